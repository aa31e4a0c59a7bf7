"""drift.py: what falls behind stock several times running gives way to it, and nothing else ever changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import autokern
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.ops import objective as objective_op
from autokern.runtime import dispatch, drift
from autokern.runtime import session as session_module
from autokern.system import host
from autokern.tuning.cost_model import CostModel
from autokern.tuning.profile import Profile, Timing, Trial

A = torch.ones(4, 4, dtype=torch.float64)


@pytest.fixture
def made(make_op, monkeypatch):
    """An op whose candidate was measured to be twice as fast; how often each function ran, and how slow it is.

    Only these functions move the clock.
    """
    calls, slowness = {"stock": 0, "fast": 0}, {"stock": 1e-3, "fast": 5e-4}
    now = 1000.0
    monkeypatch.setattr(drift.timer, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(drift.timer, "_switches", lambda: 0)
    op = make_op("drifting", problem_of=lambda a: Problem(op="drifting", m=4, n=4, grad="a" if a.requires_grad else ""))

    def candidate(name):
        def run(a):
            nonlocal now
            calls[name] += 1
            now += slowness[name]
            return 2 * a

        op.candidate(name)(run)

    candidate("stock")
    candidate("fast")
    return op, calls, slowness


def session(op, **orders):
    """A session that knows measurements of an op."""
    here = dispatch.reset(Settings(calibrate="never", **orders))
    timings = {"stock": Timing(1e-3), "fast": Timing(5e-4, 0.5, 0.01, 5)}
    trials = [Trial(Problem(op=op.name, m=n, n=n, grad=g), timings) for n in (2, 4, 8) for g in ("", "a")]
    fields = host.current()
    here.adopt(Profile(host=fields.fields, fingerprint=fields.fingerprint, trials=trials))
    return dispatch.route(op)


def served():
    return dispatch.stats()["drifting"]


def test_a_key_is_looked_at_after_a_thousand_calls_and_then_ever_more_seldom(made):
    op, calls, _ = made
    call = session(op)
    looked_at = []
    for number in range(1, 4100):
        before = calls["stock"]
        call(A)
        if calls["stock"] != before:
            looked_at.append(number)
    assert looked_at == [1000, 2000, 4000]


def test_threads_that_count_past_a_look_do_not_put_it_off_for_good(made):
    op, calls, _ = made
    call = session(op)
    call(A)
    ((entry,),) = (table.values() for table in dispatch.session().memo.values())
    entry.count = entry.due + 3  # others counted between this call's count and its comparison
    before = calls["stock"]
    call(A)
    assert calls["stock"] > before
    assert entry.due > entry.count


def test_what_falls_behind_gives_way_to_stock(made):
    op, _, slowness = made
    call = session(op)
    for _ in range(990):
        call(A)
    assert served() == {"fast": 990}
    slowness["fast"] = 2e-3
    for _ in range(300):
        call(A)
    ((decision, _count),) = dispatch.decisions()
    assert (decision.candidate, decision.source) == ("stock", "measured")
    assert decision.reason == "fast was measured to be faster; in 3 successive checks it was slower"
    before = served()["stock"]
    call(A)
    assert served()["stock"] == before + 1
    slowness["fast"] = 1e-4  # nothing is promoted again
    for _ in range(50):
        call(A)
    assert served()["stock"] == before + 51


def test_looking_again_at_a_key_of_a_full_memo_counts_no_call_twice(made, monkeypatch):
    op, _, _ = made
    call = session(op)
    monkeypatch.setattr(session_module, "_MOST_KEYS", 1)
    ratios(monkeypatch)
    for _ in range(1005):
        call(A)
    assert served() == {"fast": 1005}


def ratios(monkeypatch, *found):
    values = iter(found)
    monkeypatch.setattr(drift, "_ratio", lambda *args: next(values, 0.5))


@pytest.mark.parametrize(
    ("found", "candidate"),
    [
        ((2, 2, 2), "stock"),
        ((2, 2, 1), "fast"),
        ((2, 1, 2, 2), "fast"),
        ((1.1,) * 9, "fast"),
        ((2, 1, 2, 2, 2), "stock"),
    ],
)
def test_only_several_times_running_count(made, monkeypatch, found, candidate):
    op, _, _ = made
    call = session(op)
    ratios(monkeypatch, *found)
    for _ in range(6000):
        call(A)
    ((decision, _count),) = dispatch.decisions()
    assert decision.candidate == candidate


@pytest.mark.parametrize(
    "orders",
    [{"force": (("drifting", "fast"),)}, {"deterministic": True}, {"exclude": frozenset({"fast"})}],
    ids=["forced", "deterministic", "stock"],
)
def test_orders_are_not_looked_at(made, monkeypatch, orders):
    op, _, _ = made
    call = session(op, **orders)
    monkeypatch.setattr(drift, "check", lambda *args: pytest.fail("looked at"))
    for _ in range(1100):
        call(A)


def test_ranks_of_one_job_are_not_looked_at(made, monkeypatch):
    op, _, _ = made
    monkeypatch.setattr(host, "multi_rank", lambda: True)
    call = session(op)
    monkeypatch.setattr(drift, "check", lambda *args: pytest.fail("looked at"))
    for _ in range(1100):
        call(A)


def test_gradients_and_results_are_those_of_the_call(made):
    op, _, _ = made
    call = session(op)
    leaf = A.clone().requires_grad_()
    inner = leaf * 3
    for number in range(1, 1003):
        out = call(inner)
        if number in (999, 1000, 1001):
            (slope,) = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
            assert slope.equal(torch.full_like(A, 6.0))
    assert leaf.grad is None


def test_a_check_leaves_the_random_numbers_of_the_caller_alone(make_op):
    op = make_op("drawing", problem_of=lambda a: Problem(op="drawing", m=4, n=4))
    op.candidate("stock")(lambda a: 2 * a + 0 * torch.rand(4, 4, dtype=a.dtype))
    op.candidate("fast")(lambda a: 2 * a)
    call = session(op)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    for _ in range(1001):
        call(A)
    assert dispatch.stats()["drawing"] == {"fast": 1001}
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_check_that_fails_is_none(made, monkeypatch):
    op, _, _ = made
    call = session(op)
    monkeypatch.setattr(drift.timer, "compare", lambda calls, **more: 1 / 0)
    for _ in range(1100):
        assert call(A).equal(2 * A)
    assert served() == {"fast": 1100}


@pytest.mark.parametrize("candidate", ["exact_log_prob.fused", "objective.arrays"])
def test_whole_training_steps_are_looked_at(monkeypatch, candidate):
    import gpytorch

    x = torch.linspace(0, 1, 12, dtype=torch.float64).unsqueeze(-1)

    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, x[:, 0].sin(), gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model().double()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    found = []
    ratio = drift._ratio
    monkeypatch.setattr(drift, "_ratio", lambda *args: found.append(ratio(*args)) or 0.5)
    monkeypatch.setattr(drift, "_FIRST", 3)
    op, name = candidate.split(".")
    timings = {"stock": Timing(1e-3), name: Timing(5e-4, 0.5, 0.01, 5)}
    variant = "rbf/cholesky" if op == "exact_log_prob" else "rbf"
    problem = Problem(op=op, m=12, n=12, d=1, grad="theta", variant=variant)
    if op == "exact_log_prob":
        monkeypatch.setattr(objective_op.OBJECTIVE, "default_candidate", lambda problem: "stock")
    fields = host.current()
    known = Profile(host=fields.fields, fingerprint=fields.fingerprint, trials=[Trial(problem, timings)])
    monkeypatch.setattr(dispatch.session().__class__, "model", CostModel(known))
    losses = []
    with autokern.enabled():
        for _ in range(5):
            model.zero_grad()
            loss = -objective(model(x), model.train_targets)
            loss.backward()
            losses.append((loss.item(), *(p.grad.sum().item() for p in model.parameters())))
    assert len(set(losses)) == 1
    assert found
    assert all(value > 0 for value in found)
