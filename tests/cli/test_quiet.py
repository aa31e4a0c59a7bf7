"""quiet.py: what `autokern calibrate` does and says where others use the cores, on machines as busy as a test says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.loads import busy
from typer.testing import CliRunner

from autokern.cli import commands, commands_calibrate, quiet
from autokern.core.problem import Problem
from autokern.runtime import dispatch
from autokern.system.load import Load
from autokern.tuning.profile import QUIET, Profile, Timing, Trial


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleeping advances; others leave the cores at the time that the list holds."""
    made = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        made.now += seconds

    monkeypatch.setattr(quiet, "time", SimpleNamespace(perf_counter=lambda: made.now, sleep=sleep))
    monkeypatch.setattr(quiet.threads, "current", lambda: 2)
    return made


def _profile(count: int, disturbed: int = 0) -> Profile:
    trials = []
    for n in range(1, count + 1):
        stock = Timing(1.0, disturbed=0.2 if n <= disturbed else QUIET)
        trials.append(Trial(Problem(op="qr", m=n, n=n), {"stock": stock, "a": Timing(0.5, 0.5, 0.01)}))
    return Profile(trials=trials)


def test_a_quiet_machine_is_not_waited_for(clock):
    said = []
    assert quiet.wait(20.0, True, said.append) == 20.0
    assert said == []


def test_waiting_takes_a_quarter_of_the_budget_at_most(clock):
    busy(1.9)
    said = []
    left = quiet.wait(20.0, True, said.append)
    assert said[0] == "others use 1.9 of 2 cores; waiting up to 5 s for quiet (--no-wait measures at once)"
    assert "measuring with what is free" in said[1]
    assert 14.0 <= left <= 15.0
    assert left + clock.now == 20.0
    quiet.wait(3000.0, True, said.append)
    assert "up to 60 s" in said[2]


def test_nobody_waits_who_does_not_want_to(clock):
    busy(1.9)
    said = []
    assert quiet.wait(20.0, False, said.append) == pytest.approx(19.75)
    assert len(said) == 1


def test_waiting_ends_when_it_is_quiet(clock):
    busy(1.9)
    said = []

    def tell(text: str) -> None:
        said.append(text)
        busy(0.0)

    assert 18.0 <= quiet.wait(20.0, True, tell) < 20.0
    assert len(said) == 1


def test_verdicts(clock):
    calm, full = Load(2, others=0.1), Load(2, others=1.9)
    few, many, worse = _profile(3), _profile(9, disturbed=3), _profile(9, disturbed=4)
    assert quiet.verdict(Profile(), worse, None, calm) == ("", True)
    told, trusted = quiet.verdict(few, many, None, full)
    assert trusted
    assert told.startswith("meanwhile others use 1.9 of 2 cores: 9 problems measured, 3 disturbed")
    told, trusted = quiet.verdict(Profile(), worse, None, full)
    assert not trusted
    assert told.startswith("nothing trustworthy was measured: meanwhile others use 1.9 of 2 cores")
    assert quiet.verdict(many, many, ["qr"], full)[1], "nothing was left to measure"
    assert not quiet.verdict(worse, worse, ["qr"], full)[1]
    assert not quiet.verdict(Profile(), many, ["cholesky"], full)[1]


def test_calibrate_ends_with_a_finding_where_nothing_can_be_trusted(monkeypatch):
    busy(2.0)
    asked = []

    def measured(names, level, budget, *rest, **more):
        asked.append(budget)
        found = _profile(2, disturbed=2)
        dispatch.session().adopt(found)
        return found

    monkeypatch.setattr(commands_calibrate.measuring, "calibrate", measured)
    dispatch.reset()
    result = CliRunner().invoke(commands.app, ["calibrate", "--budget", "4"], prog_name="autokern")
    assert result.exit_code == 1
    assert "waiting up to 1 s" in result.stderr
    assert "nothing trustworthy" in result.stderr
    assert "2 problems measured, 2 disturbed" in result.stderr
    assert asked[0] <= 3.1
    result = CliRunner().invoke(commands.app, ["calibrate", "--no-wait", "--budget", "4"], prog_name="autokern")
    assert "waiting" not in result.stderr
    assert asked[1] > 3.5
