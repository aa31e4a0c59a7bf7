"""calibration.py: parts before wholes, which dispatch them; what an interrupt or a disturbance leaves."""

import functools
import time
import warnings

import msgspec
import pytest
import torch

from autokern.core.problem import Features, Problem
from autokern.core.state import inside
from autokern.runtime import dispatch
from autokern.tuning import calibration, timer
from autokern.tuning.calibration import calibrate
from autokern.tuning.chooser import Nearest
from autokern.tuning.profile import Profile, Timing, Trial

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def ops(make_op, make_pair):
    """A part that doubles a matrix, and a whole whose stock calls the part by dispatch."""
    part = make_pair("part")
    seen = {"stock": [], "direct": [], "measuring": []}
    route = dispatch.route(part)

    def stock(a):
        seen["stock"].append(inside.active)
        seen["measuring"].append(inside.measuring)
        return route(a)

    def direct(a):
        seen["direct"].append(inside.active)
        return 2 * a

    whole = make_op("whole", composite=True, nesting=1)
    whole.candidate("stock")(stock)
    whole.candidate("direct")(direct)
    return part, whole, seen


def test_parts_are_measured_first_and_dispatched_inside_of_wholes(ops):
    part, whole, seen = ops
    published = []
    found = calibrate([whole, part], "quick", 20.0, ["cpu"], Profile(), dtypes=["float64"], publish=published.append)
    assert {t.problem.op for t in found.trials} == {"part", "whole"}
    assert [{t.problem.op for t in profile.trials} for profile in published] == [{"part"}, {"part", "whole"}]
    assert [set(profile.forests) for profile in published] == [{"part@cpu"}, {"part@cpu", "whole@cpu"}]
    assert published[-1] is found, "what is returned is what was published, to the second of its date"
    assert not any(seen["stock"]), "what stock of a composite op calls is dispatched"
    assert all(seen["direct"]), "what any other candidate calls is not"
    assert all(seen["measuring"])
    assert not inside.active
    assert not inside.measuring
    entries = list(dispatch.session().memo["part"].values())
    assert {(entry.candidate.name, entry.trial) for entry in entries} == {("stock", True)}
    assert all(entry.count > 0 for entry in entries)
    assert dispatch.stats() == {}, "nobody but the calibration has called it"


def test_what_was_disturbed_is_tried_once_more_and_not_kept(ops, monkeypatch):
    part, _, _ = ops
    sizes, honest = [], timer.compare

    def compare(calls, **more):
        found = honest(calls, **more)
        sizes.append(calls)
        spoilt = len(sizes) <= 2  # the first two problems
        return {n: msgspec.structs.replace(t, disturbed=0.9 * spoilt) for n, t in found.items()}

    monkeypatch.setattr(timer, "compare", compare)
    found = calibrate([part], "quick", 5.0, ["cpu"], Profile(), dtypes=["float64"])
    assert len(sizes) == len(found.trials) + 2
    assert not any(trial.disturbed for trial in found.trials)
    assert found.levels == {"part/float64@cpu": "quick"}

    sizes.clear()
    monkeypatch.setattr(timer, "compare", lambda calls, **_: {n: Timing(1.0, disturbed=0.9) for n in calls})
    found = calibrate([part], "quick", 5.0, ["cpu"], Profile(), dtypes=["float64"])
    assert found.trials == []
    assert found.levels == {}
    assert found.fruitless == {}, "a program may measure it when it is quiet"


def test_a_problem_at_hand_that_the_op_makes_no_sample_of_does_not_end_the_calibration(make_pair):
    def sample(problem, generator):
        return (torch.ones(problem.m, problem.n, dtype={"": torch.float64}[problem.variant]),)

    op = make_pair("rare", sample=sample)
    near = Problem(op="rare", m=4, n=4, variant="unknown")
    found = calibrate([op], "quick", 1.0, ["cpu"], Profile(), dtypes=["float64"], near=near)
    assert {trial.problem.variant for trial in found.trials} == {""}


def test_what_compiles_for_long_waits_for_half_of_the_time_and_takes_a_small_part_of_it(make_pair):
    def compiled(a):
        if a.shape not in shapes:
            shapes.append(a.shape)
            time.sleep(0.2)
        return 2 * a

    shapes: list[torch.Size] = []
    op = make_pair("slow")
    op.candidate("compiled", compiles=True)(compiled)
    found = calibrate([op], "full", 2.0, ["cpu"], Profile(), dtypes=["float64"])
    with_it = [index for index, trial in enumerate(found.trials) if "compiled" in trial.timings]
    assert len(shapes) <= 1, "then a tenth of the budget is spent"
    assert all(index >= 3 for index in with_it), "the others come first"


def test_a_problem_that_seems_too_long_is_tried_again_beside_a_measured_one(make_pair, monkeypatch):
    op = make_pair("deceptive", features=lambda problem: Features(1.0, 1.5e7 * (problem.n > 10), 1.0))
    drawn = [Problem(op="deceptive", m=n, n=n) for n in (20, 5)]
    monkeypatch.setattr(calibration, "draw", lambda *_: drawn)
    found = calibrate([op], "full", 5.0, ["cpu"], Profile(), dtypes=["float64"])
    assert [trial.problem.n for trial in found.trials] == [5, 20]


def test_another_hosts_accelerator_tells_nothing_of_this_ones_time(make_pair, monkeypatch):
    """Consumers' GPUs take hundreds of times as long as a recorded one in float64: --budget 5 took 50 s."""
    tried: list[Problem] = []
    op = make_pair("elsewhere", features=lambda problem: Features(1.0, 1e12, 1.0))
    there = Trial(Problem(op="elsewhere", m=4, n=4, device="cuda"), {"stock": Timing(1e-6)})
    drawn = Problem(op="elsewhere", m=4, n=4)
    monkeypatch.setattr(calibration, "draw", lambda _, __, ___, device, *rest: [drawn.replace(device=device)])
    monkeypatch.setattr(calibration.Chooser, "nearest", lambda *_: Nearest(there, 0.0, 1e-6, here=False))
    monkeypatch.setattr(calibration.Measurer, "runnable", lambda self, problem, candidates: list(candidates))
    monkeypatch.setattr(calibration.Measurer, "timings", lambda self, op, problem, *_: tried.append(problem) or {})
    for device in ("cuda", "cpu"):
        calibrate([op], "quick", 0.5, [device], Profile(), dtypes=["float64"])
    assert tried
    assert {problem.device for problem in tried} == {"cpu"}


def test_a_trial_that_takes_far_longer_than_predicted_is_given_up(make_op):
    calls: list[str] = []

    def slow(a, name: str):
        calls.append(name)
        time.sleep(0.8)
        return 2 * a

    op = make_op("slow")
    for name in ("stock", "other", "third"):
        op.candidate(name)(functools.partial(slow, name=name))
    found = calibrate([op], "quick", 0.6, ["cpu"], Profile(), dtypes=["float64"])
    assert set(calls) == {"stock"}, "the budget is over then"
    assert not found.trials
    assert not found.banned


def test_warnings_are_filtered_as_the_program_asks(make_op):
    """Torch's warning of the first backward pass on a GPU is ignored meanwhile; what other threads change stays."""
    told = "Attempting to run cuBLAS, but there was no current CUDA context!"
    changed = ("error", None, UserWarning, None, 7)

    def speaks(a):
        warnings.warn(told, UserWarning, stacklevel=1)
        if changed not in warnings.filters:
            warnings.filters.append(changed)  # as another thread may
        return 2 * a

    op = make_op("speaking")
    op.candidate("stock")(lambda a: 2 * a)
    op.candidate("speaks")(speaks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        calibrate([op], "quick", 0.5, ["cpu"], Profile(), dtypes=["float64"])
        assert [w for w in caught if str(w.message) == told] == []
        assert list(warnings.filters) == [*before, changed]
        warnings.warn(told, UserWarning, stacklevel=1)
        assert str(caught[-1].message) == told


def test_a_disturbed_timing_replaces_no_quiet_one():
    problem = Problem(op="qr", m=3, n=3)
    first = Profile(trials=[Trial(problem, {"stock": Timing(1.0), "a": Timing(1.0), "b": Timing(1.0, disturbed=0.2)})])
    later = {"stock": Timing(2.0), "a": Timing(2.0, disturbed=0.2), "b": Timing(2.0), "c": Timing(2.0, disturbed=0.2)}
    merged = first.merge(Profile(trials=[Trial(problem, later)])).trials[0]
    assert {name: t.seconds for name, t in merged.timings.items()} == {"stock": 2.0, "a": 1.0, "b": 2.0, "c": 2.0}


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
