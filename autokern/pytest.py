"""``pytest -p autokern.pytest``: enable autokern for a test run; a line at its end says how many calls were served."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import autokern

_served = Counter[str]()


def pytest_configure() -> None:
    """Enable autokern before tests are collected; a bad variable is a usage error."""
    try:
        autokern.enable()
    except autokern.SettingsError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_unconfigure() -> None:
    """Restore the libraries' own functions."""
    autokern.disable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Count this process's calls; a worker of pytest-xdist hands them to the controller."""
    for by in autokern.stats().values():
        for name, calls in by.items():
            _served["stock" if name == "stock" else "candidates"] += calls
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["autokern"] = dict(_served)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the calls of a worker."""
    _served.update(getattr(node, "workeroutput", {}).get("autokern", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the counts."""
    off = "" if autokern.is_enabled() else f" ({autokern.status().why_off})"
    told = f"{_served['candidates']:,} calls served by candidates, {_served['stock']:,} by the library's own code"
    terminalreporter.write_line(f"autokern: {told}{off}")
