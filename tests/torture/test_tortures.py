"""Every torture leaves every promise whole, and finds the faults that are put into a copy of the package on purpose."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import harness  # noqa: E402
import t09_numerics  # noqa: E402


def mutations() -> list[tuple[str, harness.Mutation]]:
    """The deliberate faults of each script, read off it without running it."""
    found = []
    for name in harness.tortures():
        module = importlib.import_module(name)
        found += [(name, mutation) for mutation in module.MUTATIONS]
    return found


FAULTS = mutations()


@pytest.mark.timeout(7300)
@pytest.mark.parametrize("name", harness.tortures())
def test_no_promise_is_broken(name, pytestconfig, capsys):
    found = harness.run(name, pytestconfig.getoption("--torture"))
    with capsys.disabled():
        print(f"\n{name}: {found['figures']}")
    assert found["broken"] == [], f"{found['count']} promises are broken"


@pytest.mark.timeout(1900)
@pytest.mark.parametrize(("name", "mutation"), FAULTS, ids=[f"{name}: {m.name}" for name, m in FAULTS])
def test_a_deliberate_fault_is_found(name, mutation, tmp_path, capsys):
    found = harness.run(name, "fault", mutation.part, package=harness.mutated(mutation, tmp_path))
    with capsys.disabled():
        print(f"\n{name}, with a fault ({mutation.name}): {found['count']} times, first {found['broken'][:1]}")
    assert found["broken"], f"{mutation.part} did not find that {mutation.name}; it told {found['figures']}"


def test_tolerances_are_written_down():
    rows = [
        f"| `{name}` | {of.told('result')} | {of.told('gradient')} | A | {of.why} |"
        for name, of in t09_numerics.TOLERANCES.items()
    ]
    table = "\n".join(["| op | result | gradients | κ of | source |", "|---|---|---|---|---|", *rows])
    assert table in (HERE.parent.parent / "docs" / "promises.md").read_text(encoding="utf-8")


def test_every_torture_has_a_fault_that_it_must_find():
    assert {name for name, _ in FAULTS} == set(harness.tortures())
