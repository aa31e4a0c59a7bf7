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


@pytest.mark.parametrize("name", TABLE)
def test_scenario(name):
    _, found = judged(TABLE[name])
    assert not found, told(found)


def test_the_table_is_large_enough():
    assert len(TABLE) >= 400
