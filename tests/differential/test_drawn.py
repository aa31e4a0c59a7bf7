"""Beyond the table: combinations that hypothesis draws, and lives of one model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parent))

from drawn import complaints, recipes
from machine import WAYS, Life

WRONG: list[str] = []
EXAMPLES, LIVES, STEPS = 20, 4, 16
"""The tortures draw more of each."""
FEW = {
    "deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate),
}  # fmt: skip
"""Nothing is made smaller: that takes minutes, where tests have seconds."""


@settings(max_examples=EXAMPLES, **FEW)
@given(recipe=recipes(24))
def each_drawn(recipe):
    WRONG.extend(complaints(recipe, most=2))


def test_what_is_drawn_is_stocks():
    """All of it is judged: to shrink an example costs more than to read several."""
    WRONG.clear()
    each_drawn()
    assert not WRONG, "\n".join(WRONG)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("way", WAYS)
def test_a_life(way):
    kind = type("Life", (Life,), {"orders": WAYS[way]})
    run_state_machine_as_test(kind, settings=settings(max_examples=LIVES, stateful_step_count=STEPS, **FEW))
