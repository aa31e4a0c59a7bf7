"""Tortures: `--torture=ci` does what some minutes allow, `--torture=full` all, in hours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def in_earnest(pytestconfig):
    """Whether all is done."""
    return pytestconfig.getoption("--torture") == "full"
