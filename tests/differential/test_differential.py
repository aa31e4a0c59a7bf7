"""Every scenario of the table does under autokern what it does under stock, by default, by force and by chance."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import scenarios  # noqa: F401
from judge import judged
from table import TABLE


def told(found: dict[str, list[str]]) -> str:
    return "\n".join(f"[{way}] {text}" for way, texts in found.items() for text in texts[:6])


BY_FORCE = 3
"""Runs of a scenario without a profile and with candidates by force, others for each; `report.py` has all."""
EVERY = [name for name, one in TABLE.items() if one.every]
USUAL = [name for name, one in TABLE.items() if not one.rare and not one.every]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (k % 2)) for k, name in enumerate(USUAL)]
)
def test_scenario(name):
    _, found = judged(TABLE[name], brief=True)
    assert not found, told(found)


@pytest.mark.parametrize("name", EVERY)
def test_scenario_by_each_candidate(name):
    _, found = judged(TABLE[name])
    assert not found, told(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", USUAL)
def test_scenario_in_more_ways(name):
    _, found = judged(TABLE[name], most=BY_FORCE)
    assert not found, told(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in TABLE.items() if one.rare])
def test_rare_scenario(name):
    _, found = judged(TABLE[name])
    assert not found, told(found)


def test_the_table_is_large_enough():
    assert len(USUAL) >= 400
