"""measuring.py: problems that are drawn, what is checked, in which unit, and what is never begun."""

import pytest
import torch
from support.synthetic import square

from autokern.core.problem import Problem
from autokern.core.registry import get, registered
from autokern.core.state import inside
from autokern.system import host, memory
from autokern.tuning import measuring
from autokern.tuning.measuring import Measurer, Trialled, contenders, draw, trial
from autokern.tuning.profile import Ban


@pytest.mark.parametrize("op", [op.name for op in registered()])
def test_problems_of_each_op_offer_a_choice_within_the_limits(op):
    found = draw(get(op), 40, ["float64", "float32"], "cpu", "1")
    grid = [p for dtype in ("float64", "float32") for p in get(op).grid("full", dtype, "cpu")]
    assert len(found) == len(set(found)) <= 40
    assert bool(found) == any(len(contenders(p)) > 1 for p in grid)
    shapes = {(p.variant, p.grad, p.m == p.n, p.batch > 1) for p in grid}
    for problem in found:
        assert (problem.op, problem.device) == (op, "cpu")
        assert len(contenders(problem)) > 1
        assert problem.batch <= measuring._MOST_BATCH
        assert problem.d >= 2 or "ard" not in problem.words
        work = get(op).features(problem)
        assert max(work.flops / 2e10, work.bytes / 1e9) <= 1
        is_square = problem.m == problem.n
        assert {(problem.variant, problem.grad, s, problem.batch > 1) for s in (is_square, False)} & shapes
    if all(p.m >= p.n for p in grid):
        assert all(p.m >= p.n for p in found)


def test_the_same_seed_gives_the_same_and_a_study_measures_nothing_that_was_calibrated():
    op = get("kernel_matmul")
    one, again, other = (draw(op, 60, ["float64"], "cpu", seed) for seed in ("a", "a", "b"))
    assert one == again
    assert len(set(one) & set(other)) < 10


def test_a_tiny_grid_gives_few_problems_and_ends(make_op):
    op = make_op("toy", grid=lambda level, dtype, device: [square(3, "toy", dtype=dtype, device=device)])
    op.candidate("stock")(lambda a: a)
    assert draw(op, 10, ["float64"], "cpu", "1") == []
    op.candidate("other")(lambda a: a)
    found = draw(op, 10, ["float64", "float32"], "cpu", "1")
    assert set(found) == {square(3, "toy", dtype=dtype) for dtype in ("float64", "float32")}


def test_what_does_not_fit_the_memory_is_not_drawn(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda device: 2**22)
    found = draw(get("cholesky"), 30, ["float64"], "cpu", "1")
    assert all(c.name == "stock" or c.memory(p) <= 2**21 for p in found for c in contenders(p))


def test_an_accelerator_is_asked_larger_problems_than_a_processor(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda device: 2**34)
    op = get("kernel_matmul")
    here, there = ([op.features(p).flops for p in draw(op, 200, ["float32"], d, "1")] for d in ("cpu", "cuda"))
    assert max(here) <= 2e10 < max(there) <= 2e11


def toy(n: int, **more) -> Problem:
    return square(n, "toy", **more)


@pytest.fixture
def op(make_pair):
    def sample(problem, generator):
        a = torch.rand(problem.m, problem.n, dtype=torch.float64, generator=generator)
        return (a.requires_grad_(bool(problem.grad)),)

    op = make_pair("toy", sample=sample)
    op.candidate("no gradient")(lambda a: (2 * a).detach() + 0 * a)
    return op


def some(op, *names):
    return [op[name] for name in ("stock", *names)]


def test_gradients_are_judged_by_stocks_error_where_stock_was_checked_long_ago(op):
    measurer = Measurer("quick", [])
    assert set(measurer.timings(op, toy(4, grad="a"), some(op, "other"), 0.1)) == {"stock", "other"}
    assert measurer.timings(op, toy(8, grad="a"), some(op, "no gradient"), 0.1) == {}
    (ban,) = measurer.banned
    assert ban.candidate == "no gradient"
    assert "times its bound" in ban.reason


def test_a_check_that_ran_out_of_memory_is_made_up_for(op, monkeypatch):
    measurer, honest = Measurer("quick", []), measuring.gradient_errors

    def short(*args):
        raise MemoryError

    monkeypatch.setattr(measuring, "gradient_errors", short)
    with pytest.raises(MemoryError):
        measurer.timings(op, toy(4, grad="a"), some(op, "no gradient"), 0.1)
    monkeypatch.setattr(measuring, "gradient_errors", honest)
    assert measurer.timings(op, toy(4, grad="a"), some(op, "no gradient"), 0.1) == {}
    assert [ban.candidate for ban in measurer.banned] == ["no gradient"]


def test_first_calls_on_an_accelerator_are_not_the_budgets(op, monkeypatch):
    monkeypatch.setattr(memory, "fits", lambda *_: True)
    measurer = Measurer("quick", [])
    assert measurer.timings(op, toy(4), some(op, "other"), 0.1)
    assert measurer.compiling == 0
    assert measurer.timings(op, toy(4, device="cuda"), some(op, "other"), 0.1)
    assert measurer.compiling > 0
    assert measurer.setup == {}, "nothing was compiled"


def test_what_does_not_fit_the_memory_is_not_begun(op, monkeypatch):
    measurer, asked = Measurer("quick", []), []
    monkeypatch.setattr(memory, "fits", lambda need, device: asked.append(need) or need <= 1000)
    monkeypatch.setattr(type(op), "sample", lambda *_: pytest.fail("arguments of a problem that does not fit"))
    assert measurer.timings(op, toy(100), some(op, "other"), 0.1) == {}
    assert asked == [2 * 8 * 100 * 100] * 2
    assert measurer.runnable(toy(5), some(op, "other")) == some(op, "other")


def test_what_is_banned_does_not_run(op):
    measurer = Measurer("quick", [Ban("toy", "other", "float64", "cpu", "wrong")])
    assert op["other"] in measurer.runnable(toy(3, dtype="float32"), some(op, "other"))
    assert measurer.runnable(toy(3), some(op, "other", "no gradient")) == some(op, "no gradient")
    assert measurer.timings(op, toy(3), some(op, "other"), 0.1) == {}


def test_a_candidate_that_raises_or_has_no_gradient_is_banned_and_stock_that_raises_is_not(op):
    def broken(a):
        raise ValueError("no")

    op.candidate("broken")(broken)
    op.candidate("cut off")(lambda a: (2 * a).detach())
    measurer, found = Measurer("quick", []), some(op, "broken", "cut off", "other")
    assert set(measurer.timings(op, toy(3, grad="a"), found, 0.1)) == {"stock", "other"}
    assert [(b.candidate, "ValueError" in b.reason) for b in measurer.banned] == [("broken", True), ("cut off", False)]
    assert measurer.timings(op, toy(0), some(op, "other"), 0.1).keys() <= {"stock", "other"}


def test_gradients_are_those_of_the_outputs_that_have_any(op):
    op.candidate("two outputs")(lambda a: (2 * a, a.detach()))
    a = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    found = measuring.trial(op, op["two outputs"].run, toy(3, grad="a"), (a,))()
    (expected,) = measuring.trial(op, op.stock.run, toy(3, grad="a"), (a,))().grads
    assert found.grads[0].equal(expected)
    assert a.grad is None


SMOOTH = [
    (300, 38, "matern52+rbf"),
    (300, 19, "periodic+rbf"),
    (165, 18, "matern32+rq"),
    (165, 3, "rbf"),
    (300, 39, "matern32"),
]
"""Points in two dimensions, seeds and families with a gradient that is small by cancellation."""


@pytest.fixture(params=SMOOTH, ids=lambda case: case[2])
def case(request):
    n, seed, families = request.param
    op = get("exact_log_prob")
    problem = Problem(op="exact_log_prob", m=n, n=n, d=2, grad="theta", variant=f"{families}/cholesky")
    args = op.sample(problem, torch.Generator().manual_seed(seed))
    with inside.having(active=True):
        yield op, problem, args, trial(op, op.stock.run, problem, args)()


@pytest.mark.parametrize("name", ["arrays", "fused"])
def test_a_gradient_that_is_small_by_cancellation_bans_nobody(case, name):
    op, problem, args, stock = case
    error = measuring.gradient_errors(op, problem, args, stock)
    assert error(trial(op, op[name].run, problem, args)()) <= 1


@pytest.mark.parametrize("share", [1e-7, 1e-3])
def test_every_gradient_that_is_off_is_found(case, share):
    op, problem, args, stock = case
    error = measuring.gradient_errors(op, problem, args, stock)
    found = trial(op, op["arrays"].run, problem, args)()
    for place in range(len(found.grads)):
        grads = [grad * (1 + share) if at == place else grad for at, grad in enumerate(found.grads)]
        assert error(Trialled(found.out, tuple(grads))) > 1
    broken = [torch.full_like(grad, torch.nan) for grad in found.grads]
    assert error(Trialled(found.out, tuple(broken))) > 1


def test_moves_are_of_one_eps_and_repeatable():
    op = get("cholesky")
    problem = Problem(op="cholesky", m=5, n=5, grad="a")
    args = op.sample(problem, torch.Generator().manual_seed(0))
    exact, moved, again = (measuring.truth(op, problem, args, move).out for move in (None, 1, 1))
    assert torch.equal(moved, again)
    assert not torch.equal(moved, exact)
    torch.testing.assert_close(moved, exact, rtol=1e-13, atol=1e-14)
    single = measuring.truth(op, problem.replace(dtype="float32"), args, 1).out
    assert 1e-9 < (single - exact).abs().max() < 1e-5
