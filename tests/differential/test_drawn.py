"""Beyond the table: combinations that hypothesis draws, and lives of one model; more of each with --torture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parent))

from drawn import complaints, recipes
from machine import WAYS, Life

pytestmark = pytest.mark.timeout(7200)


class Size(NamedTuple):
    """How much is drawn: recipes, the most points of one, runs by force, lives of a model in each way, their steps."""

    recipes: int
    largest: int
    most: int
    lives: int
    steps: int

    def few(self, examples: int) -> settings:
        """Nothing is made smaller: that takes minutes, where tests have seconds."""
        return settings(
            max_examples=examples, stateful_step_count=self.steps, derandomize=self is not SIZES["full"], deadline=None,
            database=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate),
        )  # fmt: skip


SIZES = {None: Size(20, 24, 2, 4, 16), "ci": Size(40, 24, 4, 8, 16), "full": Size(3000, 140, 14, 300, 40)}


@pytest.fixture
def size(request):
    return SIZES[request.config.getoption("--torture")]


def test_what_is_drawn_is_stocks(size):
    """All of it is judged: to shrink an example costs more than to read several."""
    wrong: list[str] = []

    @size.few(size.recipes)
    @given(recipe=recipes(size.largest))
    def each(recipe):
        wrong.extend(complaints(recipe, size.most))

    each()
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("way", WAYS)
def test_a_life(way, size):
    kind = type("Life", (Life,), {"orders": WAYS[way]})
    run_state_machine_as_test(kind, settings=size.few(size.lives))
