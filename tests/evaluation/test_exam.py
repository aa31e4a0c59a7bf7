"""The exam of a calibration: choices that lose to the shipped ones or to stock give way, within the noise they stay."""

import contextlib
import math
import random

import numpy as np
import pytest
import torch
from support import synthetic
from support.bases import fit_base
from support.clocks import Clock
from support.fakes import as_if_of_autokern

import autokern
from autokern.core.problem import Problem
from autokern.core.state import inside
from autokern.evaluation import calibrate as exam
from autokern.hooks import install
from autokern.runtime import dispatch
from autokern.system import host
from autokern.tuning import calibration, chooser, store, timer
from autokern.tuning.chooser import fitted
from autokern.tuning.profile import Examined, Kept, Profile, Timing, Trial

pytestmark = pytest.mark.usefixtures("one_thread")
N = 64


def square(n: int, op: str = "part") -> Problem:
    return synthetic.square(n, op)


def trials(op: str, **ratios: float) -> list[Trial]:
    return synthetic.trials(ratios, synthetic.SIZES[:5], 0.001, op=op)


class World(Clock):
    """Fake ops whose candidates take the seconds of a table, as they are; profiles may say otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = {"stock": 1.0, "fast": 0.5, "other": 0.5}

    def candidate(self, name: str):
        return self.takes(lambda: self.seconds[name])


@pytest.fixture
def world(make_op, monkeypatch):
    """A part and a whole, and a task that calls the part; other hosts found `other` fastest, this one `fast`."""
    found = World()
    monkeypatch.setattr(timer, "compare", found.compare)
    part = make_op("part")
    for name in found.seconds:
        part.candidate(name)(found.candidate(name))
    found.part, found.route = part, dispatch.route(part)
    found.a = torch.ones(N, N, dtype=torch.float64)
    found.tasks = [("a task", lambda: lambda: found.route(found.a))]
    monkeypatch.setattr(exam, "tasks", lambda: iter(found.tasks))
    base = fit_base(part, [trials("part", other=0.6, fast=0.9)] * 2)
    monkeypatch.setattr(chooser, "recorded", lambda: chooser.Shipped({"part@cpu": base}))
    return found


def profile(**ratios: float) -> Profile:
    """What a calibration has measured, by default that `fast` is fastest."""
    return synthetic.measured(ratios or {"fast": 0.5, "other": 0.6}, synthetic.SIZES[:5], 0.001, op="part")


def choice(found: Profile, n: int = N) -> str:
    dispatch.session().adopt(found)
    return dispatch.explain(square(n)).candidate


FAST, OTHER = {"fast": 0.5, "other": 0.6}, {"other": 0.6, "fast": 0.9}
EXAMS = {
    "new choices win": (FAST, {"fast": 0.4, "other": 0.6}, 0.001, "", 0.4, 0.6),
    "new choices lose to the shipped ones": (FAST, {"fast": 0.8, "other": 0.6}, 0.001, "shipped", 0.6, 0.6),
    "all lose to stock": (OTHER, {"other": 1.5}, 0.001, "stock", 1.0, 1.5),
    "near": (FAST, {"fast": 0.61, "other": 0.6}, 0.001, "", 0.61, 0.6),
    "within the noise": (FAST, {"fast": 0.7, "other": 0.6}, 0.08, "", 0.7, 0.6),
    "beyond the noise": (FAST, {"fast": 0.7, "other": 0.6}, 0.02, "shipped", 0.6, 0.6),
}


def of(op: str, instead: str) -> Kept:
    return Kept(op, "float64", "cpu", "", False, 36, 112, instead)


@pytest.mark.parametrize(("known", "seconds", "noise", "kept", "new", "shipped"), EXAMS.values(), ids=EXAMS)
def test_choices_that_lose_beyond_the_noise_give_way(world, known, seconds, noise, kept, new, shipped):
    """The profile, what candidates take in the task, the noise; what is kept, and the times of new and shipped."""
    world.seconds |= seconds
    world.noise = noise
    found = exam.examined(profile(**known), "quick", 10.0)
    doubt = noise if kept == "shipped" else math.hypot(noise, noise)  # of one choice or of two
    assert found.exam == [Examined("a task", 1e-6, shipped, new, doubt, kept)]
    assert found.kept == ([of("part", kept)] if kept else [])
    mine = next(iter(known))
    alike = [mine == "other", *([kept == "shipped"] if kept else [])]  # what gave way is timed as it is from now on
    timed = [("stock", "shipped") if same else ("stock", "shipped", "new") for same in alike]
    assert world.compared == timed, "one choice is timed once"
    theirs = {"": mine, "shipped": "other", "stock": "stock"}[kept]
    assert [choice(found, n) for n in (35, 36, N, 112, 113)] == [mine, theirs, theirs, theirs, mine]


def test_only_the_outermost_choices_go_back_to_stock(world, make_op, monkeypatch):
    """What they call is measured by itself, and may be right in other tasks."""
    whole = make_op("whole", nesting=3, composite=True)
    whole.candidate("stock")(world.route)
    whole.candidate("direct")(world.takes(lambda: 2.0))  # longer than profiles say
    route = dispatch.route(whole)
    world.tasks = [("a task", lambda: lambda: (route(world.a), world.route(world.a)))]
    of_whole, of_part = trials("whole", direct=0.3), trials("part", other=0.6)
    bases = {"whole@cpu": fit_base(whole, [of_whole]), "part@cpu": fit_base(world.part, [of_part])}
    monkeypatch.setattr(chooser, "recorded", lambda: chooser.Shipped(bases))
    found = exam.examined(fitted(profile(other=0.6).merge(Profile(trials=of_whole))), "quick", 10.0)
    assert found.kept == [of("whole", "stock")]
    assert (found.exam[0].new, found.exam[0].shipped, found.exam[0].kept) == (0.5, 1.25, "stock")


def test_a_lost_task_is_timed_again_three_times(world, make_op, monkeypatch):
    """Each time the outermost of four nested choices goes back, so that the next one runs."""
    call, bases, known = world.route, {}, profile(other=0.6)
    for level in range(1, 5):
        op = make_op(f"whole{level}", nesting=level, composite=True)
        op.candidate("stock")(call)
        op.candidate("direct")(world.takes(lambda level=level: 5.0 + level))
        found = trials(op.name, direct=0.3)
        bases[f"{op.name}@cpu"], known = fit_base(op, [found]), known.merge(Profile(trials=found))
        call = dispatch.route(op)
    monkeypatch.setattr(chooser, "recorded", lambda: chooser.Shipped(bases))
    world.tasks = [("a task", lambda: lambda: call(world.a))]
    found = exam.examined(fitted(known), "quick", 10.0)
    assert [(one.op, one.instead) for one in found.kept] == [(f"whole{level}", "stock") for level in (2, 3, 4)]


def test_disturbed_timings_decide_nothing(world):
    world.seconds |= {"fast": 5.0}
    world.disturbed = 0.2
    found = exam.examined(profile(), "quick", 10.0)
    assert (found.kept, found.exam) == ([], [])
    assert choice(found) == "fast"


def test_a_calibration_forgets_what_was_kept_of_ops_that_it_measures(world):
    known = profile()
    known.kept.append(of("part", "stock"))
    again = calibration.calibrate([world.part], "quick", 2.0, ["cpu"], known, dtypes=["float64"])
    assert len(again.trials) > len(known.trials)
    assert again.kept == []
    assert known.merge(again).kept == []


def state():
    return (
        torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), torch.is_grad_enabled(),
        torch.get_default_dtype(), dispatch.session(), dispatch.session().profile, inside.active, inside.measuring,
        install._depth,
    )  # fmt: skip


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_exam_leaves_everything_as_it_was(world, error, grad):
    @as_if_of_autokern
    def task():
        torch.rand(3)
        world.route(world.a)
        if error is not None and inside.active is False and len(world.compared):
            raise error

    world.tasks = [("a task", lambda: task)]
    raised = pytest.raises(error) if error is KeyboardInterrupt else contextlib.nullcontext()  # what fails is left out
    with torch.set_grad_enabled(grad):
        before = state()
        with raised:
            exam.examined(profile(), "quick", 10.0)
        assert state() == before
        assert dispatch.stats() == {}, "its calls are not the user's"


@pytest.mark.parametrize("context", [torch.no_grad, lambda: torch.device("meta")], ids=["no_grad", "device"])
def test_tasks_do_not_depend_on_the_modes_of_the_caller(world, monkeypatch, context):
    world.tasks = [("training step", lambda: exam._step(5, torch.float64))]

    def run(calls, **_):
        for call in calls.values():
            call()
        return {name: Timing(1.0) for name in calls}

    monkeypatch.setattr(timer, "compare", run)
    with install.enabled(), context():
        (row,) = exam.examined(profile(), "quick", 10.0).exam
    assert row.task == "training step"


def test_a_calibration_ends_with_an_exam_that_is_kept_on_disk(world):
    world.seconds |= {"fast": 0.8, "other": 0.6}
    found = autokern.calibrate(["part"], budget=5.0, devices=["cpu"], progress=False)
    assert [row.task for row in found.exam] == ["a task"]
    kept = store.load(dispatch.session().settings, host.current().fingerprint)
    assert (kept.exam, kept.kept, kept.forests) == (found.exam, found.kept, found.forests)
    assert dispatch.session().profile is found
    assert dispatch.explain(square(N)).candidate == "other"


PLACES = [("measuring", KeyboardInterrupt), ("measuring", RuntimeError), ("exam", KeyboardInterrupt)]


@pytest.mark.parametrize(("where", "error"), [*PLACES, ("saving", KeyboardInterrupt)])
def test_an_interrupted_calibration_leaves_the_profile_of_before(world, monkeypatch, where, error):
    first = autokern.calibrate(["part"], budget=5.0, devices=["cpu"], progress=False)
    (path,) = store.home(dispatch.session().settings).glob("*.json")
    before, session = path.read_bytes(), dispatch.session()
    assert first.forests

    def stop(*_, **__):
        raise error

    if where == "exam":
        world.tasks = [("a task", lambda: stop)]
    elif where == "saving":
        monkeypatch.setattr(store, "save", stop)
    else:
        world.part.candidate("new")(world.candidate("stock"))  # so that there is something to measure
        times = iter([0, 0])
        monkeypatch.setattr(timer, "compare", lambda calls, **more: stop() if next(times, 1) else world.compare(calls))
    with pytest.raises(error):
        autokern.calibrate(["part"], budget=5.0, devices=["cpu"], progress=False)
    assert path.read_bytes() == before
    assert (dispatch.session(), dispatch.session().profile) == (session, first)
    assert (inside.active, inside.measuring, install._depth) == (False, False, 0)


def test_tasks_can_be_made_and_run_small():
    names = [name for name, _ in exam.tasks()]
    assert len(names) == len(set(names))
    assert all("n = " in name and name.endswith(("float32", "float64", "gradient, n = 60, float64")) for name in names)
    tasks = [exam._step(5, torch.float32), exam._prediction(5, again=False), exam._prediction(5, again=True)]
    tasks += [exam._fantasy(5), exam._acquisition(5)]
    with install.enabled():
        for task in tasks:
            task()
            task()
    assert "posterior" in dispatch.stats()
