"""Trees of other hosts, as `calibration/ship.py` fits them for the package, and the tables of recorded hosts."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "calibration"))

from machines import Replayed
from ship import fit_base, pack

__all__ = ["Replayed", "fit_base", "pack"]
