"""Tortures: `--torture=ci` does what some minutes allow, `--torture=full` all, in hours."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
