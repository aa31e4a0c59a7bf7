"""The libraries' functions that densities, predictions and fantasies depend on, besides the classes of a model.

`relied.json` lists the functions that stock runs for each; `calibration/record_routes.py` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path

from autokern.core.releases.known import Relied, relied

_routes: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
ALGEBRA = tuple(_routes["algebra"])
"""Functions that form and factorise a covariance."""
DENSITY = tuple(_routes["density"])
"""Functions that compute a marginal likelihood from a prior."""
TASKS = tuple(_routes["tasks"])
"""Functions that compute the marginal likelihood of several tasks observed at the same points."""
PREDICTION = tuple(_routes["prediction"])
"""Functions that compute a prediction from a prior and a factor."""
MEMORY = tuple(_routes["memory"])
"""Functions that take operators apart and cache results on them."""
density: Relied = relied(*DENSITY)
prediction: Relied = relied(*PREDICTION)
fantasy: Relied = relied(*_routes["fantasy"])
"""Functions that compute a fantasy from the caches of its model."""
