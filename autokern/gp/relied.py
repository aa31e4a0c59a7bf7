"""What densities, predictions and fantasies rely on in the libraries, beside the classes that a model consists of.

`relied.json` has the functions that stock runs for them; `calibration/record_routes.py` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path

from autokern.core.known import Relied, relied

__all__ = ["ALGEBRA", "DENSITY", "MEMORY", "PREDICTION", "TASKS", "density", "fantasy", "prediction"]

_routes: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
ALGEBRA = tuple(_routes["algebra"])
"""How a covariance is formed and factorised."""
DENSITY = tuple(_routes["density"])
"""How a marginal likelihood is computed from a prior."""
TASKS = tuple(_routes["tasks"])
"""How that of several tasks observed at the same points is computed."""
PREDICTION = tuple(_routes["prediction"])
"""How a distribution of new points is computed from a prior and a factor."""
MEMORY = tuple(_routes["memory"])
"""How operators are taken apart, and how results are kept on them."""
density: Relied = relied(*DENSITY)
prediction: Relied = relied(*PREDICTION)
fantasy: Relied = relied(*_routes["fantasy"])
"""How a fantasy grows from the caches of its model."""
