"""Calls so small, or in such modes, that stock serves without a question; a cold call asks each question once."""

from collections import Counter
from pathlib import Path

import linear_operator
import pytest
import torch
from msgspec import structs
from msgspec.structs import replace
from support.bases import Replayed
from support.models import rough, step
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import autokern
from autokern.core.problem import Problem
from autokern.core.registry import get, registered
from autokern.core.settings import Settings
from autokern.runtime import dispatch
from autokern.system import host, memory
from autokern.tuning import store
from autokern.tuning.chooser import HIGHEST, fitted, floor
from autokern.tuning.profile import Profile, Timing, Trial
from autokern.tuning.store import read_file

pytestmark = pytest.mark.usefixtures("one_thread")
FORCED = {"kernel_matrix": "gemm", "exact_log_prob": "fused"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_what_it_computed_whatever_was_decided_meanwhile(reentrant):
    def gradients(meanwhile):
        model = rough(30)
        kernel, x = model.covar_module, model.train_inputs[0].clone().requires_grad_()
        k = checkpoint(lambda x: kernel(x).to_dense(), x, use_reentrant=reentrant)
        meanwhile()
        k.square().sum().backward()
        return [x.grad, *(p.grad for p in kernel.parameters())]

    expected = gradients(lambda: None)
    with autokern.enabled():
        with autokern.using(force={"kernel_matrix": "gemm"}):
            block = autokern.using(force={"kernel_matrix": "broadcast"})
            found = gradients(block.__enter__)
            block.__exit__(None, None, None)
        torch.testing.assert_close(found, expected)


def test_saved_tensors_that_are_kept_elsewhere_are_those_of_stock():
    def packed():
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
            step(rough(30))
        return seen

    expected = packed()
    with autokern.enabled(), autokern.using(force=FORCED):
        assert packed() == expected


WON_FROM = 4096
SMALL, LARGE = torch.randn(32, 8, dtype=torch.float64), torch.randn(1024, 64, dtype=torch.float64)


def profile(candidate="choleskyqr2", won_from=WON_FROM):
    """Measurements by which a candidate is twice as fast as stock from so many elements on, and half as fast below."""
    found = []
    for m in (16, 32, 64, 128, 256, 512, 1024, 2048):
        for n in (m // 8, m // 4, m // 2):
            for dtype in ("float32", "float64"):
                ratio = 0.5 if m * n >= won_from else 2.0
                timings = {"stock": Timing(1e-4, rounds=9), candidate: Timing(1e-4 * ratio, ratio, 0.01, 9)}
                found += [Trial(Problem(op="qr", m=m, n=n, dtype=dtype, grad=grad), timings) for grad in ("", "a")]
    return fitted(Profile(trials=found))


def qr(a):
    return linear_operator.utils.qr.stable_qr(a)


def calls_of_qr():
    return autokern.stats().get("qr", {})


class Floor:
    """The floor of `qr` in the session in force."""

    cpu = property(lambda self: dispatch.session().floor("qr", "cpu"))
    cuda = property(lambda self: dispatch.session().floor("qr", "cuda"))


@pytest.fixture
def measured():
    """Hooks with such a profile in force."""
    with autokern.enabled():
        dispatch.session().adopt(profile())
        yield Floor()


def test_below_the_floor_no_decision_is_taken_and_above_it_one_is(measured):
    assert WON_FROM // 8 <= measured.cpu <= WON_FROM
    assert measured.cuda == 0
    q, r = qr(SMALL)
    assert torch.equal(q, torch.linalg.qr(SMALL)[0])
    torch.testing.assert_close(q @ r, SMALL)
    assert calls_of_qr() == {}
    assert autokern.explain().decisions == []
    qr(LARGE)
    assert calls_of_qr() == {"choleskyqr2": 1}


QR = {"force": {"qr": "choleskyqr2"}}
ORDERS = [
    (QR, {"force": (("qr", "choleskyqr2"),)}),
    ({"force": "random:3"}, {"random_seed": 3}),
    ({"exclude": ["choleskyqr2"]}, {"exclude": frozenset({"qr=choleskyqr2"})}),
    ({"memory": "1GiB"}, {"memory": 2**30}),
    *((order, order) for order in ({"accuracy": "approximate"}, {"calls": 100})),
    (None, {"calibrate": "first-use"}),
]


@pytest.mark.parametrize(("of_a_block", "of_the_settings"), ORDERS)
def test_an_order_is_obeyed_below_the_floor(measured, of_a_block, of_the_settings):
    for block in [] if of_a_block is None else [of_a_block]:
        with autokern.using(**block):
            qr(SMALL)
            assert sum(calls_of_qr().values()) == 1
            assert block is not QR or calls_of_qr() == {"choleskyqr2": 1}
        qr(SMALL)
        assert sum(calls_of_qr().values()) == 1
    dispatch.reset(Settings(**{"calibrate": "never", **of_the_settings})).adopt(profile())
    assert measured.cpu == 0
    qr(SMALL)
    assert sum(calls_of_qr().values()) == 1
    assert of_a_block is not QR or calls_of_qr() == {"choleskyqr2": 1}


def test_a_candidate_of_a_plugin_lowers_the_floor_once_it_is_measured(measured):
    op = get("qr")
    before = list(op.listed)
    op.candidate("theirs")(torch.linalg.qr)
    try:
        dispatch.session().adopt(profile(candidate="theirs", won_from=64))
        assert measured.cpu <= 64
        qr(SMALL)
        assert calls_of_qr() == {"theirs": 1}
    finally:
        op.listed[:] = before


def test_a_floor_belongs_to_the_choices_in_force(measured):
    found = measured.cpu
    old = dispatch.session()
    dispatch.reset(Settings(calibrate="never"))
    assert measured.cpu == 0
    old.adopt(profile())  # a thread of before may still measure
    assert measured.cpu == 0
    dispatch.session().adopt(profile(won_from=2**30))
    assert measured.cpu == HIGHEST > found
    dispatch.session().adopt(Profile())
    assert measured.cpu == 0


def test_floors_follow_from_a_profile_that_is_loaded(tmp_path):
    known, here = profile(), host.current()
    store.save(Settings(home=tmp_path), structs.replace(known, host=here.fields, fingerprint=here.fingerprint))
    with autokern.enabled():
        dispatch.reset(Settings(calibrate="never", home=tmp_path))
        assert Floor().cpu == 0
        qr(LARGE)
        assert Floor().cpu == known.forests["qr@cpu"].floor > 0


def test_subclasses_modes_and_compilers_meet_what_they_met(measured):
    class Own(torch.Tensor):
        pass

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    names = []
    assert type(qr(SMALL.as_subclass(Own))[0]) is Own
    for large in (LARGE.as_subclass(Own), LARGE):
        autokern.linalg.qr(large)
    assert calls_of_qr() == {"stock": 2, "choleskyqr2": 1}
    with Seen():
        qr(SMALL)
    assert "linalg_qr" in names
    torch.testing.assert_close(torch.compile(qr, backend="eager")(SMALL)[1], torch.linalg.qr(SMALL)[1])


def test_an_op_that_may_choose_something_unmeasured_has_no_floor():
    assert floor(get("solve"), profile().forests["qr@cpu"], "cpu") == 0


HOST = next(iter(sorted((Path(__file__).parents[2] / "calibration" / "hosts").glob("*.json"))))
QUESTIONS = ("unsupported", "unavailable", "memory")


@pytest.fixture
def asked(monkeypatch):
    """How often each candidate of each op was asked each question, by what it was asked; not by other candidates."""
    counts: Counter[tuple[object, ...]] = Counter()
    within = []

    def counted(op, candidate, question):
        honest = getattr(candidate, question)

        def answer(of):
            counts[op.name, candidate.name, question, of] += not within
            within.append(question)
            try:
                return honest(of)
            finally:
                within.pop()

        return answer

    for op in registered():
        watched = [replace(c, **{q: counted(op, c, q) for q in QUESTIONS}) for c in op.candidates]
        monkeypatch.setattr(op, "listed", watched)
    return counts


def sampled(op):
    """Arguments of the smallest problem that has a coarse neighbour, or of the smallest of all."""
    problem = min(op.grid("quick", "float64", "cpu"), key=lambda p: (p == p.coarse, p.batch * p.m * p.n))
    return op.sample(problem, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("accuracy", ["same", "approximate"])
@pytest.mark.parametrize("name", [op.name for op in registered()])
def test_each_question_is_asked_once(asked, monkeypatch, name, accuracy, large):
    op = get(name)
    args = sampled(op)
    here = dispatch.reset(Settings(calibrate="never", accuracy=accuracy))
    here.adopt(read_file(HOST))
    if large:
        monkeypatch.setattr(memory, "LARGE", 1)
    problem = op.problem_of(*args)
    asked.clear()
    entry = here.entry(op, args, here.settings)
    assert entry.decision.problem == problem
    found = {key: count for key, count in asked.items() if key[0] == name}
    of = {key[3] for key in found if key[2] != "unavailable"}
    assert of == {problem} if large else of <= {problem, problem.coarse}
    for (_, candidate, question, _), count in found.items():
        most = len(of) if question == "unavailable" else 1  # it is asked about a kind of device, not about a problem
        assert count <= most, (candidate, question)


def test_a_recorded_host_is_not_asked_about_this_machine(asked):
    table = Replayed(get("qr"), Problem(op="qr", m=500, n=50), read_file(HOST))
    table.feasible()
    assert {question for _, _, question, _ in asked} == {"unsupported"}
    assert table.memory.keys() == set(get("qr").names())
