"""What `autokern calibrate` does and says where others use the cores, on machines as busy as a test says."""

from __future__ import annotations

from support.loads import busy
from typer.testing import CliRunner

from autokern.cli import commands, commands_measured
from autokern.core.problem import Problem
from autokern.runtime import dispatch
from autokern.system.load import Load
from autokern.tuning.profile import QUIET, Profile, Timing, Trial


def _profile(count: int, disturbed: int = 0) -> Profile:
    trials = []
    for n in range(1, count + 1):
        stock = Timing(1.0, disturbed=0.2 if n <= disturbed else QUIET)
        trials.append(Trial(Problem(op="qr", m=n, n=n), {"stock": stock, "a": Timing(0.5, 0.5, 0.01)}))
    return Profile(trials=trials)


def test_verdicts(monkeypatch):
    monkeypatch.setattr(commands_measured.threads, "current", lambda: 2)
    calm, full = Load(2, others=0.1), Load(2, others=1.9)
    few, many, worse = _profile(3), _profile(9, disturbed=3), _profile(9, disturbed=4)
    assert commands_measured.verdict(Profile(), worse, None, calm) == ("", True)
    told, trusted = commands_measured.verdict(few, many, None, full)
    assert trusted
    assert told.startswith("meanwhile others use 1.9 of 2 cores: 9 problems measured, 3 disturbed")
    told, trusted = commands_measured.verdict(Profile(), worse, None, full)
    assert not trusted
    assert told.startswith("nothing trustworthy was measured: meanwhile others use 1.9 of 2 cores")
    assert commands_measured.verdict(many, many, ["qr"], full)[1], "nothing was left to measure"
    assert not commands_measured.verdict(worse, worse, ["qr"], full)[1]
    assert not commands_measured.verdict(Profile(), many, ["cholesky"], full)[1]


def test_calibrate_ends_with_a_finding_where_nothing_can_be_trusted(monkeypatch):
    busy(2.0)

    def measured(names, level, budget, *rest, **more):
        found = _profile(2, disturbed=2)
        dispatch.session().adopt(found)
        return found

    monkeypatch.setattr(commands_measured.evaluation, "calibrate", measured)
    dispatch.reset()
    result = CliRunner().invoke(commands.app, ["calibrate", "--budget", "4", "--no-wait"], prog_name="autokern")
    assert result.exit_code == 1
    assert "others use 2.0 of 2 cores; measuring with what is free" in result.stderr
    assert "`--thorough` were removed and are ignored" in result.stderr
    assert "nothing trustworthy" in result.stderr
    assert "2 problems measured, 2 disturbed" in result.stderr
