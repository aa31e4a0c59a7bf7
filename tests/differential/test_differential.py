"""Every scenario of the table does under autokern what it does under stock, by default, by force and by chance."""

import pytest
import scenarios  # noqa: F401
from compare import judged
from table import TABLE, Scenario

RARE = [name for name, one in TABLE.items() if one.rare]
LONG = [name for name, one in TABLE.items() if one.most < Scenario.most and not one.rare]
"""Those of large models, of which the fast tests force nothing."""
USUAL = [name for name in TABLE if name not in {*RARE, *LONG}]


def check(name: str, most: int = 99) -> None:
    found = judged(TABLE[name], most)
    assert not found, "\n".join(f"[{way}] {text}" for way, texts in found.items() for text in texts[:6])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (k % 3 > 0)) for k, name in enumerate(USUAL)]
)
def test_scenario(name):
    """By a recorded profile, by each candidate that can serve, and by chance; two of three are slow tests."""
    check(name)


@pytest.mark.parametrize("name", LONG)
def test_long_scenario(name):
    check(name, most=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RARE, *LONG])
def test_rare_scenario(name):
    check(name)


def test_the_table_is_large_enough():
    assert len(USUAL) >= 600
