"""Tortures: not part of the fast tests. ``pytest --torture=ci`` runs them small, ``--torture=full`` in earnest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

_FIGURES = pytest.StashKey[dict[str, dict[str, Any]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FIGURES] = {}


@pytest.fixture
def torture_size(request: pytest.FixtureRequest) -> str:
    """The size that was asked for."""
    return str(request.config.getoption("--torture"))


@pytest.fixture
def torture_report(request: pytest.FixtureRequest) -> Callable[[str, dict[str, Any]], None]:
    """What files figures for the report at the end."""
    return request.config.stash[_FIGURES].__setitem__


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    figures = config.stash.get(_FIGURES, {})
    if figures:
        terminalreporter.section("tortures")
    for name, found in figures.items():
        for what, told in found.items():
            terminalreporter.line(f"{name}: {what}: {told}")
