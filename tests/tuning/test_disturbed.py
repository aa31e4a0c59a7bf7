"""Disturbed timings: which are kept, and that they replace no quiet ones."""

from __future__ import annotations

import msgspec

from autokern.core.problem import Problem
from autokern.tuning import timer
from autokern.tuning.calibration import calibrate
from autokern.tuning.measuring import trusted
from autokern.tuning.profile import QUIET, Profile, Timing, Trial, decode


def test_timings_that_are_trusted():
    quiet, bad = Timing(1e-3), Timing(1e-3, disturbed=0.9)
    assert set(trusted({"stock": quiet, "a": quiet, "b": bad})) == {"stock", "a"}
    assert trusted({"stock": bad, "a": quiet, "b": quiet}) == {}
    assert trusted({"stock": quiet, "b": bad}) == {}


def test_a_disturbed_timing_replaces_no_quiet_one():
    problem = Problem(op="qr", m=3, n=3)
    first = Profile(trials=[Trial(problem, {"stock": Timing(1.0), "a": Timing(1.0), "b": Timing(1.0, disturbed=0.2)})])
    later = {"stock": Timing(2.0), "a": Timing(2.0, disturbed=0.2), "b": Timing(2.0), "c": Timing(2.0, disturbed=0.2)}
    merged = first.merge(Profile(trials=[Trial(problem, later)])).trials[0]
    assert {name: t.seconds for name, t in merged.timings.items()} == {"stock": 2.0, "a": 1.0, "b": 2.0, "c": 2.0}


def test_disturbance_is_kept_in_files_and_absent_where_there_was_none():
    timings = [{"stock": Timing(1e-3, disturbed=share), "a": Timing(5e-4, disturbed=share)} for share in (0.2, QUIET)]
    profile = Profile(trials=[Trial(Problem(op="qr", m=n, n=n), told) for n, told in enumerate(timings, 1)])
    text = msgspec.json.encode(profile)
    assert text.count(b"disturbed") == 2
    assert decode(text) == profile
    assert [trial.disturbed for trial in profile.trials] == [True, False]


def test_disturbed_problems_are_measured_again_and_quiet_ones_are_not(make_pair, monkeypatch):
    monkeypatch.setattr(timer, "compare", lambda calls, **_: dict.fromkeys(calls, Timing(2e-4)))
    op = make_pair("double")
    once = calibrate([op], "quick", 1.0, ["cpu"], Profile(), dtypes=["float64"])
    problems = [trial.problem for trial in once.trials]
    assert len(problems) > 2
    shares = [0.2 * (index == 1) for index in range(len(problems))]
    timings = [{"stock": Timing(1e-4), "other": Timing(1e-4, disturbed=share)} for share in shares]
    known = Profile(trials=[Trial(p, t) for p, t in zip(problems, timings, strict=True)])
    found = calibrate([op], "quick", 1.0, ["cpu"], known, dtypes=["float64"])
    assert [trial.problem for trial in found.trials if trial.timings["stock"].seconds == 2e-4] == [problems[1]]
