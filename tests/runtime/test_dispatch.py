"""dispatch.py: from a call to the candidate that runs, whatever fails on the way."""

import contextlib
import contextvars
import errno
import os
import threading
import time
import warnings

import pytest
import torch
from msgspec import structs
from support.fakes import as_if_of_autokern
from support.synthetic import measured as profiled
from support.threads import in_threads
from torch._subclasses import FakeTensorMode

import autokern
from autokern.core.errors import AutokernWarning, MemoryBudgetError, ProfileError
from autokern.core.problem import Features
from autokern.core.settings import Settings
from autokern.core.state import inside
from autokern.runtime import dispatch, memo
from autokern.runtime import session as session_module
from autokern.tuning import calibration, policy, store
from autokern.tuning.profile import Profile, dated

pytestmark = pytest.mark.usefixtures("one_thread")
NEVER = Settings(calibrate="never")


class Toy:
    """A dispatched op that doubles a matrix, of which every run is noted, and which fails when told to."""

    def __init__(self, make_op, **options):
        self.runs: list[str] = []
        self.errors: dict[str, BaseException] = {}
        self.meanwhile = None
        self.op = make_op("double", features=lambda p: Features(calls=1, flops=float(p.m * p.n)), **options)
        for name in ("stock", "fast", "other"):
            self.op.candidate(name)(self._runner(name))
        self.call = dispatch.route(self.op)

    def _runner(self, name):
        def run(a):
            self.runs.append(name)
            if self.meanwhile is not None:
                self.meanwhile()
            if name in self.errors:
                raise self.errors[name]
            return 2 * a

        return run

    def profile(self) -> Profile:
        return profiled({"fast": 0.3, "other": 0.5}, (2, 4, 8, 30, 100, 300, 1000), op="double")


@pytest.fixture
def make_toy(make_op):
    """A maker of toys with measurements by which `fast` is the fastest and `other` the next."""

    def make(settings=NEVER, **options) -> Toy:
        made = Toy(make_op, **options)
        dispatch.reset(settings).adopt(made.profile())
        return made

    return make


@pytest.fixture
def toy(make_toy):
    return make_toy()


def matrix(n: int = 4) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.float64)


def test_a_call_is_decided_once(toy, monkeypatch):
    decided = []
    honest = policy.decide
    monkeypatch.setattr(policy, "decide", lambda *a: decided.append(1) or honest(*a))
    for _ in range(5):
        assert toy.call(matrix()).equal(2 * matrix())
    assert toy.runs == ["fast"] * 5
    assert len(decided) == 1
    toy.call(matrix(5))
    assert len(decided) == 2


def test_the_memo_and_what_is_told_are_bounded_and_counts_survive(toy, monkeypatch):
    monkeypatch.setattr(session_module, "_MOST_KEYS", 5)
    for n in range(1, 301):
        toy.call(torch.ones(n, 1))
        assert len(dispatch.session().memo["double"]) <= 5
    with autokern.using(exclude=["fast"]):
        for n in range(1, 24):
            toy.call(matrix(n))
        assert len(memo.current.get().memo["double"]) <= 5
    assert autokern.stats()["double"] == {"fast": 300, "other": 23}
    dispatch.session().adopt(Profile())
    sizes = [decision.problem.m for decision, _ in dispatch.decisions()]
    assert len(sizes) == 200
    assert {300, *range(1, 24)} <= {*sizes}, "the latest ones"


@pytest.mark.parametrize(("reader", "read"), [("key", {}.pop), ("problem_of", {}.pop), ("problem_of", lambda a: None)])
def test_arguments_that_cannot_be_read_or_are_not_ours_mean_stock_without_a_word(make_toy, reader, read):
    toy = make_toy(**{reader: read})
    assert toy.call(matrix()).equal(2 * matrix())
    assert toy.runs == ["stock"]


def traced(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is deprecated, and still used
        found = torch.jit.trace(call, (matrix(),), check_trace=False)
    assert found(3 * matrix()).equal(6 * matrix())


def faked(call):
    with FakeTensorMode() as mode:
        assert call(mode.from_tensor(matrix())).shape == (4, 4)


def under_autocast(call):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call(matrix())


MODES = {
    "vmap": lambda call: torch.func.vmap(call)(torch.ones(3, 2, 2)),
    "grad": lambda call: torch.func.grad(lambda a: call(a).sum())(matrix()),
    "jvp": lambda call: torch.func.jvp(call, (matrix(),), (matrix(),)),
    "trace": traced,
    "fake tensors": faked,
    "autocast": under_autocast,
}


@pytest.mark.parametrize("way", MODES.values(), ids=MODES)
def test_transforms_traces_fake_tensors_and_autocast_run_stock(toy, way):
    way(toy.call)
    assert toy.runs == ["stock"]
    assert autokern.stats() == {}


def test_a_candidate_that_calls_the_op_gets_stock(toy):
    def recursive(a):
        assert dispatch.bypassed()
        return toy.call(a)

    toy.op.candidate("recursive")(recursive)
    with autokern.using(force={"double": "recursive"}):
        toy.call(matrix())
    assert toy.runs == ["stock"]
    assert not dispatch.bypassed()


def test_using_nests_and_ends_also_with_an_exception(toy):
    with contextlib.suppress(ZeroDivisionError), autokern.using(force={"double": "other"}):
        toy.call(matrix())
        with autokern.using(force={"double": "stock"}):
            toy.call(matrix())
            with autokern.using(exclude=["fast"]):
                toy.call(matrix())
        toy.call(matrix())
        raise ZeroDivisionError
    toy.call(matrix())
    assert toy.runs == ["other", "stock", "stock", "other", "fast"]


def test_using_holds_for_one_thread(toy):
    with autokern.using(force={"double": "other"}):
        in_threads(toy.call, [matrix()])
        in_threads(contextvars.copy_context().run, [toy.call], [matrix()])
    assert toy.runs == ["fast", "other"]


FULL = r"double\.fast ran out of memory .* other runs from now on"
FAILURES = {
    "a candidate": (
        {"fast": RuntimeError("no such instruction")},
        r"double\.fast failed \(RuntimeError: no such instruction\).*AUTOKERN_EXCLUDE=double=fast",
        ["fast", "stock"],
        ["stock"],
    ),
    "memory": ({"fast": MemoryError("full")}, FULL, ["fast", "other"], ["other"]),
    "a GPU's memory": ({"fast": torch.OutOfMemoryError("CUDA out of memory")}, FULL, ["fast", "other"], ["other"]),
    "strict, memory": ({"fast": MemoryError("full")}, FULL, ["fast", "other"], ["other"]),
    "strict": ({"fast": RuntimeError("broken")}, "fast", ["fast", "stock"], ["fast"]),
    "stock too": ({"fast": RuntimeError("mine"), "stock": IndexError("yours")}, "stock", ["fast", "stock"], ["fast"]),
    "the contract": ({"fast": ArithmeticError("not positive definite")}, "fast", ["fast"], ["fast"]),
    "an alarm": ({"fast": TimeoutError("late")}, "fast", ["fast"], ["fast"]),
    "an interrupt": ({"fast": KeyboardInterrupt()}, "fast", ["fast"], ["fast"]),
    "an exit": ({"fast": SystemExit()}, "fast", ["fast"], ["fast"]),
}


@pytest.mark.parametrize("what", FAILURES)
def test_what_fails_gives_way_with_one_warning_for_that_key_or_raises_what_is_the_callers(make_toy, what):
    """Each row: the errors, the warning or whose error is raised, what runs, and what runs at the next call."""
    errors, told, runs, later = FAILURES[what]
    toy = make_toy(Settings(calibrate="never", strict="strict" in what), raises=(ArithmeticError,))
    toy.errors = dict(errors)
    if told in errors:
        with pytest.raises(type(errors[told])) as caught:
            toy.call(matrix())
        assert caught.value is errors[told]
    else:
        with pytest.warns(AutokernWarning, match=told) as heard:
            assert toy.call(matrix()).equal(2 * matrix())
        assert len(heard) == 1
    assert not inside.active
    toy.errors.clear()
    toy.call(matrix())
    toy.call(matrix(3))
    assert toy.runs == [*runs, *later, "fast"]


def test_what_was_decided_is_not_trusted_when_memory_has_become_short(make_toy, free):
    toy = make_toy(memory=lambda p: 10**6 * p.n)
    toy.op.candidate("frugal", memory=lambda p: 10**5 * p.n)(toy._runner("frugal"))
    for there in (10**9, 5 * 10**8, 10**8, 10**9):
        free.bytes = there
        toy.call(matrix(900))
    assert toy.runs == ["fast", "frugal", "frugal", "fast"]
    free.bytes = 10**7
    with pytest.raises(MemoryBudgetError):
        toy.call(matrix(900))
    free.bytes = 10**9
    toy.call(matrix(900))
    assert toy.runs[4:] == ["fast"]


@pytest.fixture
def begin(monkeypatch):
    """A function that sets variables and begins anew, as another process does."""

    def begin(**variables):
        for name, text in variables.items():
            monkeypatch.setenv(name, str(text))
        store._reported.clear()
        return dispatch.reset()

    return begin


@pytest.fixture
def measured(monkeypatch, begin):
    """First-use calibration is on; the list holds the names of the ops that were measured."""
    seen = []
    honest = calibration.calibrate

    def noted(ops, *args, **more):
        seen.extend(op.name for op in ops)
        return honest(ops, *args, **more)

    monkeypatch.setattr(calibration, "calibrate", noted)
    begin(AUTOKERN_CALIBRATE="first-use", AUTOKERN_BUDGET=60)
    return seen


@pytest.fixture
def new(make_op):
    """A toy of which nothing is measured."""
    return Toy(make_op)


def test_the_first_use_measures_once_and_saves(new, begin, measured):
    assert new.call(matrix()).equal(2 * matrix())
    assert measured == ["double"]
    found = dispatch.session().profile
    assert len({t.problem.n for t in found.trials}) > 2
    assert set(found.trials[0].timings) == {"stock", "fast", "other"}
    assert all("stock" in t.timings for t in found.trials)
    for n in (4, 5, 6):
        new.call(matrix(n))
    assert measured == ["double"]
    kept = store.load(dispatch.session().settings, found.fingerprint)
    assert kept.trials == found.trials
    assert begin().profile == found
    new.call(matrix())
    assert measured == ["double"]


ORDERS = {
    "AUTOKERN_CALIBRATE": "never", "AUTOKERN_BUDGET": "0", "AUTOKERN_DETERMINISTIC": "1", "AUTOKERN": "0",
    "WORLD_SIZE": "2", "forked": "", "AUTOKERN_PROFILE": "",
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_nothing_is_measured_against_orders_by_one_of_several_ranks_in_a_fork_or_beside_a_pinned_profile(
    new, begin, measured, monkeypatch, tmp_path, name
):
    path = tmp_path / "pinned.json"
    store.write_file(path, profiled({"fast": 0.3}, (2, 4, 8, 30), op="double"))  # too few to count as measured
    monkeypatch.setattr("autokern.runtime.review.forked", lambda: name == "forked")
    begin(**{name: ORDERS[name] or path})
    new.call(matrix())
    new.call(torch.ones(3, 3, dtype=torch.float32))
    assert (measured, new.runs) == ([], ["fast" if name == "AUTOKERN_PROFILE" else "stock"] * 2)
    assert {"AUTOKERN=0" in found.reason for found, _ in dispatch.decisions()} == {name == "AUTOKERN"}
    assert sum(calls for _, calls in dispatch.decisions()) == 2


@pytest.mark.parametrize("name", ["", "missing.json", "broken.json"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_pinned_profile_that_is_none_is_named_once_and_not_used(new, begin, tmp_path, name, strict):
    (tmp_path / "broken.json").write_bytes(b"{")
    begin(AUTOKERN_PROFILE=tmp_path / name, AUTOKERN_STRICT=int(strict))
    told = rf"asked for the profile in .*{name}; found: .*Name one file"
    with pytest.raises(ProfileError, match=told) if strict else pytest.warns(AutokernWarning, match=told):
        new.call(matrix())
    if not strict:
        dispatch.reset()
        new.call(matrix())
        assert new.runs == ["stock"] * 2


HOMES = {
    "below a file": "file/below",
    "a link to itself": "loop",
    "a read-only file system": "new",
}


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
def test_a_home_that_is_none_costs_one_warning(new, begin, measured, monkeypatch, tmp_path, home):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    if home == "new":
        monkeypatch.setattr(os, "mkdir", as_if_of_autokern(read_only))
    begin(AUTOKERN_HOME=tmp_path / home)
    with pytest.warns(AutokernWarning) as told:
        found = [new.call(matrix(n)) for n in (4, 4, 5)]
    assert len(told) == 1
    assert all(one.equal(2 * matrix(len(one))) for one in found)
    assert measured == ["double"]
    assert dispatch.session().profile.trials


def read_only(path, *args, **options):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


@pytest.mark.parametrize("tried", [False, True], ids=["measured", "tried in vain"])
def test_what_another_process_measured_since_the_profile_was_read_is_used(new, measured, tried):
    here = dispatch.session().profile
    found = new.profile() if not tried else Profile(fruitless={"double/float64@cpu": dated()})
    store.save(dispatch.session().settings, structs.replace(found, host=here.host, fingerprint=here.fingerprint))
    new.call(matrix())
    new.call(matrix(5))
    assert measured == []
    assert new.runs[-1] == ("stock" if tried else "fast")


def test_other_threads_do_not_wait_for_a_calibration(new, measured):
    started, proceed = threading.Event(), threading.Event()

    def slow(a):
        started.set()
        assert proceed.wait(60)
        return 2 * a

    new.op.candidate("slow")(slow)
    thread = threading.Thread(target=new.call, args=(matrix(),))
    thread.start()
    assert started.wait(60)
    new.runs.clear()
    assert new.call(matrix()).equal(2 * matrix())
    assert new.runs == ["stock"]
    proceed.set()
    thread.join()
    assert measured == ["double"]


def test_an_op_of_which_nothing_can_be_measured_in_time_is_left_alone_for_a_day(new, measured, begin, monkeypatch):
    begin(AUTOKERN_BUDGET=1e-6)
    new.call(matrix())
    assert measured == ["double"]
    assert set(dispatch.session().profile.fruitless) == {"double/float64@cpu"}
    for _ in range(2):
        begin(AUTOKERN_BUDGET=60)
        new.call(matrix())
    assert measured == ["double"]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 25 * 3600)
    begin()
    new.call(matrix())
    assert measured == ["double", "double"]
    found = dispatch.session().profile
    assert found.trials
    assert found.fruitless == {}
    assert store.load(dispatch.session().settings, found.fingerprint).fruitless == {}


def test_an_interrupted_calibration_leaves_nothing_behind_and_is_not_tried_again(new, measured):
    calls = []

    def impatient(a):
        calls.append(a.shape[0])
        if len(set(calls)) > 1:
            raise KeyboardInterrupt
        return 2 * a

    new.op.candidate("impatient")(impatient)
    with pytest.raises(KeyboardInterrupt):
        new.call(matrix())
    assert not inside.active
    found = dispatch.session().profile
    assert (found.trials, found.forests) == ([], {}), "half of the sizes would choose for all of them"
    assert store.load(dispatch.session().settings, found.fingerprint) is None
    new.runs.clear()
    assert new.call(matrix()).equal(2 * matrix())
    assert (measured, new.runs) == (["double"], ["stock"])


@pytest.mark.parametrize(
    ("reader", "what", "order"), [("memory", "decide a call of", "never"), ("sample", "measure", "first-use")]
)
def test_trouble_in_deciding_or_measuring_costs_only_speed(make_op, measured, begin, reader, what, order):
    def broken(*_):
        raise RuntimeError("not today")

    begin(AUTOKERN_CALIBRATE=order)
    toy = Toy(make_op, **{reader: broken})
    with pytest.warns(AutokernWarning, match=rf"could not {what} double.*not today"):
        assert toy.call(matrix()).equal(2 * matrix())
    toy.call(matrix())
    assert (measured, toy.runs) == (["double"] * (reader == "sample"), ["stock", "stock"])
    begin(AUTOKERN_STRICT=1)
    with pytest.raises(RuntimeError, match="not today"):
        toy.call(matrix())


def test_threads_that_decide_a_key_at_once_lose_no_call(toy, monkeypatch):
    decided, entry = threading.Barrier(2), dispatch.Session.entry

    def together(*args):
        made = entry(*args)
        decided.wait(60)
        return made

    monkeypatch.setattr(dispatch.Session, "entry", together)
    in_threads(toy.call, [matrix()] * 2)
    assert dispatch.stats()["double"] == {"fast": 2}
