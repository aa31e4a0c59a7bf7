"""Switching autokern on and off as its users do it, each in a process of its own."""

import os

import pytest
from support.programs import python

BARE = {name: text for name, text in os.environ.items() if not name.startswith("AUTOKERN")}


def told(code: str, **variables: str) -> list[str]:
    """Run code in a process without any other variable of autokern; return the lines that it prints."""
    run = python("-W", "ignore::FutureWarning", "-c", code, check=True, env={**BARE, **variables})
    return [*run.stdout.splitlines(), *run.stderr.splitlines()]


def test_another_import_enables_again_after_disable():
    code = """
import autokern.auto, autokern
autokern.disable()
print(autokern.is_enabled(), autokern.status().why_off)
import autokern.auto
print(autokern.is_enabled(), autokern.status().why_off)
import autokern.auto
autokern.disable()
print(autokern.is_enabled())
from autokern import auto
print(autokern.is_enabled())
"""
    advice = "`import autokern.auto` or autokern.enable() enables it"
    assert told(code) == [f"False {advice}", "True ", "False", "True"]


LOOK = "import autokern.auto, autokern; print(autokern.is_enabled(), autokern.stats()); print(autokern.explain())"


@pytest.mark.parametrize(
    ("name", "why", "off"),
    [
        ("AUTOKERN_BUDGET", "AUTOKERN_BUDGET='soon': expected", "AUTOKERN_BUDGET='soon': expected"),
        pytest.param("AUTOKERN_EXCLUDE", "'soon' was excluded", "'soon' was excluded", marks=pytest.mark.slow),
    ],
)
def test_a_bad_value_is_warned_of_once_and_raises_nowhere(name, why, off):
    on, nothing, *warned = told(LOOK + "; print(autokern.status().why_off)", **{name: "soon"})
    assert (on, nothing) == ("False {}", "autokern has taken no decision in this process")
    (line,) = [line for line in warned if "AutokernWarning" in line]
    assert f"autokern stays off: {why}" in line
    assert warned[0].startswith(off)


@pytest.mark.parametrize(("text", "on"), [("1", True), ("0", False)])
def test_the_variable_switches_off_and_is_told(text, on):
    found = told(LOOK + "; print(autokern.status().why_off)", AUTOKERN=text, AUTOKERNEL_PATH="/x")
    assert found[0] == f"{on} {{}}"
    assert ("AUTOKERN=0 keeps it off" in found) != on
