"""measuring.py: what is checked, in which unit, and what is never begun."""

from __future__ import annotations

import pytest
import torch

from autokern.core.problem import Problem
from autokern.system import memory
from autokern.tuning import measuring
from autokern.tuning.measuring import Measurer
from autokern.tuning.profile import Ban


def square(n: int, **more) -> Problem:
    return Problem(op="toy", m=n, n=n, **more)


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
    assert set(measurer.timings(op, square(4, grad="a"), some(op, "other"), 0.1)) == {"stock", "other"}
    assert measurer.timings(op, square(8, grad="a"), some(op, "no gradient"), 0.1) == {}
    (ban,) = measurer.banned
    assert ban.candidate == "no gradient"
    assert "times its bound" in ban.reason


def test_a_check_that_ran_out_of_memory_is_made_up_for(op, monkeypatch):
    measurer, honest = Measurer("quick", []), measuring.gradient_errors

    def short(*args):
        raise MemoryError

    monkeypatch.setattr(measuring, "gradient_errors", short)
    with pytest.raises(MemoryError):
        measurer.timings(op, square(4, grad="a"), some(op, "no gradient"), 0.1)
    monkeypatch.setattr(measuring, "gradient_errors", honest)
    assert measurer.timings(op, square(4, grad="a"), some(op, "no gradient"), 0.1) == {}
    assert [ban.candidate for ban in measurer.banned] == ["no gradient"]


def test_first_calls_on_an_accelerator_are_not_the_budgets(op, monkeypatch):
    monkeypatch.setattr(memory, "fits", lambda *_: True)
    measurer = Measurer("quick", [])
    assert measurer.timings(op, square(4), some(op, "other"), 0.1)
    assert measurer.compiling == 0
    assert measurer.timings(op, square(4, device="cuda"), some(op, "other"), 0.1)
    assert measurer.compiling > 0
    assert measurer.setup == {}, "nothing was compiled"


def test_what_does_not_fit_the_memory_is_not_begun(op, monkeypatch):
    measurer, asked = Measurer("quick", []), []
    monkeypatch.setattr(memory, "fits", lambda need, device: asked.append(need) or need <= 1000)
    monkeypatch.setattr(type(op), "sample", lambda *_: pytest.fail("arguments of a problem that does not fit"))
    assert measurer.timings(op, square(100), some(op, "other"), 0.1) == {}
    assert asked == [2 * 8 * 100 * 100] * 2
    assert measurer.runnable(square(5), some(op, "other")) == some(op, "other")


def test_what_is_banned_does_not_run(op):
    measurer = Measurer("quick", [Ban("toy", "other", "float64", "cpu", "wrong")])
    assert op["other"] in measurer.runnable(square(3, dtype="float32"), some(op, "other"))
    assert measurer.runnable(square(3), some(op, "other", "no gradient")) == some(op, "no gradient")
    assert measurer.timings(op, square(3), some(op, "other"), 0.1) == {}


def test_a_candidate_that_raises_or_has_no_gradient_is_banned_and_stock_that_raises_is_not(op):
    def broken(a):
        raise ValueError("no")

    op.candidate("broken")(broken)
    op.candidate("cut off")(lambda a: (2 * a).detach())
    measurer, found = Measurer("quick", []), some(op, "broken", "cut off", "other")
    assert set(measurer.timings(op, square(3, grad="a"), found, 0.1)) == {"stock", "other"}
    assert [(b.candidate, "ValueError" in b.reason) for b in measurer.banned] == [("broken", True), ("cut off", False)]
    assert measurer.timings(op, square(0), some(op, "other"), 0.1).keys() <= {"stock", "other"}


def test_gradients_are_those_of_the_outputs_that_have_any(op):
    op.candidate("two outputs")(lambda a: (2 * a, a.detach()))
    a = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    found = measuring.trial(op, op["two outputs"].run, square(3, grad="a"), (a,))()
    (expected,) = measuring.trial(op, op.stock.run, square(3, grad="a"), (a,))().grads
    assert found.grads[0].equal(expected)
    assert a.grad is None


def test_errors_of_lower_precision_are_measured_and_ban_nothing(op):
    op.candidate("rough", accuracy="approximate")(lambda a: (2 * a).half().double())
    measurer = Measurer("quick", [])
    found = measurer.timings(op, square(8), some(op, "rough"), 0.1)
    assert 1e-5 < found["rough"].relative_error < 1e-2
    assert found["stock"].relative_error is None
    assert measurer.banned == []
