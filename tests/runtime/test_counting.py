"""counting.py, met.py, the hook of linear_cg: exact gradients where stock's are loose; products are counted."""

from __future__ import annotations

import math
import os
from pathlib import Path

import gpytorch
import linear_operator
import pytest
import torch
from linear_operator.utils.errors import NotPSDError
from support.fakes import as_if_of_autokern

import autokern
from autokern.core.decision import Decision
from autokern.core.feasibility import Feasibility
from autokern.core.op import inside
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.core.settings import Settings
from autokern.gp import array_density, likelihood
from autokern.ops import _iterations
from autokern.runtime import api, counting, dispatch
from autokern.runtime import session as session_module
from autokern.runtime.memo import Entry
from autokern.system import host
from autokern.tuning.chooser import Chooser, fitted
from autokern.tuning.drawing import measurable
from autokern.tuning.policy import decide, described
from autokern.tuning.profile import Profile, Timing, Trial

A = torch.ones(4, 4, dtype=torch.float64)
LOOSE = Problem(op="exact_log_prob", m=1500, n=1500, d=3, variant="rbf/cg", grad="theta")


# --- the policy -------------------------------------------------------------------------------------------------------


@pytest.fixture
def loose(make_op):
    """An op of which stock iterates to a loose tolerance: each product takes as long as the rest of a call."""
    made = make_op(
        "loose",
        approximates=lambda problem: True,
        may_cost=lambda problem: 1.5,
        harder=lambda problem, candidate, products=0: (1 + (products or 10)) / 11 if candidate.as_stock else 1.0,
        remark=lambda problem: "stock is loose",
    )
    made.candidate("stock")(lambda a: a)
    made.candidate("exact", accuracy="better")(lambda a: a)
    made.candidate("formless", as_stock=True)(lambda a: a)
    return made


def profile(op, **ratios):
    timings = {"stock": Timing(1e-3), **{name: Timing(1e-3 * r, r, 0.01, 5) for name, r in ratios.items()}}
    here = host.current()
    trials = [Trial(Problem(op=op.name, m=n, n=n), timings) for n in (4, 8, 16)]
    return fitted(Profile(host=here.fields, fingerprint=here.fingerprint, trials=trials))


def chosen(op, products=0, **ratios):
    chooser, table = Chooser(profile(op, **ratios)), Feasibility(op, Problem(op=op.name, m=8, n=8))
    return described(decide(table, chooser, Settings(), products=products), chooser, Settings(), products)


@pytest.mark.parametrize(
    ("exact", "formless", "products", "expected"),
    [
        (0.9, 1.0, 0, "exact"),
        (1.45, 1.0, 0, "exact"),
        (1.45, 0.5, 0, "exact"),  # what is as loose as stock may be faster
        (1.6, 1.0, 0, "stock"),
        (1.6, 0.5, 0, "formless"),
        (1.6, 0.5, 32, "exact"),  # stock takes three times as long as in the measurement
        (4.4, 0.5, 32, "exact"),
        (4.6, 0.5, 32, "formless"),
    ],
)
def test_exact_is_preferred_up_to_what_it_may_cost(loose, exact, formless, products, expected):
    found = chosen(loose, products, exact=exact, formless=formless)
    assert found.candidate == expected
    assert found.remark.startswith("stock is loose")
    assert found.predicted["stock"] == pytest.approx(1e-3 * (1 + (products or 10)) / 11, rel=0.05)
    if expected == "exact":
        assert "in no more than 1.5 times its expected time" in found.reason
    else:
        assert "exact would be exact, in" in found.remark
    assert (f"on yours it takes {products} products" in str(found)) is (products > 0)


def test_samples_tell_nothing_of_what_iterates_tightly(make_op):
    op = make_op("system", approximates=lambda problem: True, default_candidate=lambda problem: "tight")
    op.candidate("stock")(lambda a: a)
    op.candidate("formless", as_stock=True)(lambda a: a)
    op.candidate("tight", accuracy="better", as_stock=True)(lambda a: a)
    assert op["tight"].tight
    assert not op["formless"].tight
    for ratios in ({}, {"tight": 9.0}):  # as a profile may have it that says so all the same
        assert chosen(op, formless=0.5, **ratios).candidate == "tight"
    for level in ("quick", "full"):
        measured = measurable(op, Problem(op="system", m=8, n=8), level)
        assert [c.name for c in measured] == ["stock", "formless"]
        large = LOOSE.replace(m=2600, n=2600)
        assert "preconditioned" not in [c.name for c in measurable(get("exact_log_prob"), large, level)]


def test_without_a_preference_nothing_has_changed(make_op):
    op = make_op("close", approximates=lambda problem: True)
    op.candidate("stock")(lambda a: a)
    op.candidate("exact", accuracy="better")(lambda a: a)
    assert chosen(op, exact=1.02).candidate == "exact"
    assert chosen(op, exact=1.2).candidate == "stock"
    assert not chosen(op, exact=1.2).remark


# --- what the package ships -------------------------------------------------------------------------------------------


def test_what_is_usual_is_read_from_the_study():
    op, known = get("exact_log_prob"), _iterations.counted()
    assert known.least >= 20
    assert known.points == sorted(known.points)
    assert 0 < known.errors[0] < known.errors[1]
    stock, formless, fused = (op[name] for name in ("stock", "matrix-free", "fused"))
    assert op.harder(LOOSE, fused) == op.harder(LOOSE, fused, 500) == 1
    assert op.harder(LOOSE, stock, known.least) == 1
    assert op.harder(LOOSE, stock) > 1  # without a preconditioner, real systems are hard
    assert 1 < op.harder(LOOSE, stock, 100) < op.harder(LOOSE, formless, 100) < 100 / known.least
    assert op.harder(LOOSE.replace(n=1000), stock) == op.harder(LOOSE, stock)
    assert op.harder(LOOSE.replace(n=10**5), stock) == op.harder(LOOSE.replace(n=known.points[-1]), stock)
    assert op.may_cost(LOOSE) >= op.may_cost(LOOSE.replace(device="cuda")) == 1.3
    assert "gradients are off by" in op.remark(LOOSE)


def test_the_preconditioner_of_the_library_sets_problems_apart():
    op = get("exact_log_prob")

    def octaves(problem):
        places = (op.coordinates(problem.replace(m=n, n=n)) for n in (1999, 2000))
        return math.dist(*places)

    assert octaves(LOOSE) == pytest.approx(0.5, abs=0.01)
    assert octaves(LOOSE.replace(variant="rbf/cholesky")) < 0.01


def test_other_problems_are_as_they_were():
    op, problem = get("exact_log_prob"), LOOSE.replace(variant="rbf/cholesky")
    assert op.may_cost(problem) == op.harder(problem, op.stock, 100) == 1
    assert not op.remark(problem)


def test_exact_is_the_default_up_to_some_thousand_points():
    op, most = get("exact_log_prob"), _iterations.counted().exact
    assert most >= 2000
    for n, expected in ((900, "fused"), (1000, "mixed-inverse"), (most, "mixed-inverse"), (most + 1, "preconditioned")):
        assert op.default_candidate(LOOSE.replace(m=n, n=n)) == expected
    assert op.default_candidate(LOOSE.replace(dtype="float32")) == "fused"
    assert op.default_candidate(LOOSE.replace(batch=2)) == "fused"
    assert op.default_candidate(LOOSE.replace(variant="linear+rbf/cg")) == "stock"
    assert op.default_candidate(LOOSE.replace(device="cuda")) == "stock"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"n": 100_000, "m": 1000}, "merged"),
        ({"n": 100_000, "m": 2500}, "merged"),
        ({"n": 20_000, "m": 10_000}, "preconditioned"),
        ({"n": 10**6, "m": 20_000}, "preconditioned"),  # no room for such a factor
        ({"n": 400_000, "m": 2000, "variant": "rbf/cg/grid"}, "kronecker"),
        ({"n": 8000, "m": 2000, "variant": "rbf/cg/grid"}, "preconditioned"),
        ({"n": 400_000, "m": 2000, "variant": "rbf/cg/grid", "device": "cuda"}, "stock"),
    ],
)
def test_structure_serves_large_models_where_it_takes_less_than_iterations(changes, expected):
    assert get("exact_log_prob").default_candidate(LOOSE.replace(**changes)) == expected


@pytest.mark.parametrize("n", [400, 1600, 2000, 3000])
def test_a_problem_of_so_many_points_has_no_structure(n):
    found = api.problem("exact_log_prob", n=n)
    assert (found.m, found.n) == (n, n)
    assert "grid" not in found.words
    assert ("cg" in found.words) is (n > 800)


def test_what_iterates_tightly_serves_unmeasured_where_stock_does_not_fit(make_op):
    op = make_op(
        "tight",
        approximates=lambda problem: True,
        default_candidate=lambda problem: "tight",
        memory=lambda problem: 2**40,
    )
    op.candidate("stock")(lambda a: a)
    op.candidate("formless", as_stock=True, memory=lambda problem: 1)(lambda a: a)
    op.candidate("tight", accuracy="better", memory=lambda problem: 1)(lambda a: a)
    table = Feasibility(op, Problem(op=op.name, m=8, n=8))
    assert decide(table, Chooser(profile(op, formless=0.5)), Settings(memory=2**20)).candidate == "tight"


# --- counting ---------------------------------------------------------------------------------------------------------


def regression(n, noise=1e-3, seed=0):
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()

    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, (7 * x[:, 0]).sin() + x[:, 1], likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model().double()
    model.likelihood.noise = noise
    model.covar_module.base_kernel.lengthscale = 0.2
    return model


def step(model):
    model.zero_grad()
    loss = -gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)(
        model(*model.train_inputs), model.train_targets
    )
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return loss.detach(), gradient


def test_products_are_counted_and_nothing_else_changes():
    a = torch.randn(60, 60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a = a @ a.mT + torch.eye(60).double()
    rhs, asked = torch.ones(60, 2, dtype=torch.float64), []

    def multiply(vectors):
        asked.append(vectors.shape)
        return a @ vectors

    expected = linear_operator.utils.linear_cg(a.matmul, rhs, tolerance=1e-3)
    with autokern.enabled():
        for matrix in (multiply, a):
            before = inside.products
            found = linear_operator.utils.linear_cg(matrix, rhs, tolerance=1e-3)
            assert found.equal(expected)
            assert inside.products - before == len(asked)
        with pytest.raises(RuntimeError, match="must be a tensor, or a callable"):
            linear_operator.utils.linear_cg(3, rhs)
    before = inside.products
    linear_operator.utils.linear_cg(a, rhs)
    assert inside.products == before


class Slow:
    """An op whose stock counts so many products in each call."""

    def __init__(self, make_op, products):
        self.calls = {"stock": 0, "exact": 0}
        self.op = make_op(
            "slow",
            problem_of=lambda a: Problem(op="slow", m=a.shape[0], n=a.shape[1]),
            approximates=lambda problem: True,
            may_cost=lambda problem: 1.5,
            harder=lambda problem, candidate, products=0: max(products, 20) / 20 if candidate.as_stock else 1.0,
            remark=lambda problem: "stock is loose",
        )

        def stock(a):
            self.calls["stock"] += 1
            inside.products += products
            return 2 * a

        def exact(a):
            self.calls["exact"] += 1
            return 2 * a

        self.op.candidate("stock")(stock)
        self.op.candidate("exact", accuracy="better")(exact)

    def call(self, exact, **orders):
        home = Path(os.environ["AUTOKERN_HOME"])
        dispatch.reset(Settings(calibrate="never", home=home, **orders)).adopt(profile(self.op, exact=exact))
        return dispatch.route(self.op)


def test_a_system_that_takes_many_products_is_served_exactly(make_op):
    slow = Slow(make_op, 60)
    call = slow.call(3.0)
    for _ in range(3000):
        assert call(A).equal(2 * A)
    assert slow.calls == {"stock": 3, "exact": 2997}  # a key changes once
    found = dispatch.explain(Problem(op="slow", m=4, n=4))
    assert (found.candidate, "on yours it takes 60 products" in str(found)) == ("exact", True)
    assert dispatch.route(slow.op)(torch.ones(4, 4, dtype=torch.float32)).shape == (4, 4)


def test_a_system_that_takes_few_is_left_to_stock(make_op):
    slow = Slow(make_op, 21)
    call = slow.call(3.0)
    for _ in range(200):
        call(A)
    assert slow.calls == {"stock": 200, "exact": 0}


@pytest.mark.parametrize(
    "orders",
    [{"deterministic": True}, {"force": (("slow", "stock"),)}],
    ids=["deterministic", "forced"],
)
def test_what_is_frozen_stays(make_op, orders):
    slow = Slow(make_op, 500)
    call = slow.call(3.0, **orders)
    for _ in range(100):
        call(A)
    assert slow.calls == {"stock": 100, "exact": 0}


@pytest.mark.parametrize("name", ["multi_rank", "forked"])
def test_ranks_and_children_count_no_more(make_op, monkeypatch, name):
    slow = Slow(make_op, 500)
    call = slow.call(3.0)
    call(A)
    monkeypatch.setattr(host, name, lambda: True)
    for _ in range(99):
        call(A)
    assert slow.calls == {"stock": 100, "exact": 0}


def test_a_decision_that_fails_leaves_the_key_as_it_is(make_op, monkeypatch):
    slow = Slow(make_op, 500)
    call = slow.call(3.0)
    call(A)

    @as_if_of_autokern
    def failing(*args):
        raise ValueError("no decision")

    with monkeypatch.context() as patch:
        patch.setattr(dispatch.session(), "decide", failing)
        for _ in range(14):
            assert call(A).equal(2 * A)
    assert slow.calls == {"stock": 15, "exact": 0}
    call(A)
    assert slow.calls == {"stock": 15, "exact": 1}


def test_threads_that_count_past_a_check_do_not_put_it_off_for_good(make_op):
    slow = Slow(make_op, 500)
    call = slow.call(3.0)
    call(A)
    ((entry,),) = (table.values() for table in dispatch.session().memo.values())
    entry.count = entry.due + 3  # others counted between this call's count and its comparison
    call(A)
    assert slow.calls == {"stock": 1, "exact": 1}


def test_a_key_of_a_full_memo_that_is_decided_again_counts_no_call_twice(make_op, monkeypatch):
    slow = Slow(make_op, 500)
    call = slow.call(3.0)
    monkeypatch.setattr(session_module, "_MOST_KEYS", 1)
    for _ in range(50):
        call(A)
    assert sum(dispatch.stats()["slow"].values()) == 50


def test_nothing_is_counted_on_a_device_or_of_what_compiles(make_op):
    op = Slow(make_op, 500).op
    op.candidate("compiled", as_stock=True, compiles=True)(lambda a: 2 * a)
    for device, name, expected in (("cpu", "stock", True), ("cuda", "stock", False), ("cpu", "compiled", False)):
        problem = Problem(op="slow", m=4, n=4, device=device)
        made = Decision(problem=problem, candidate=name, reason="", source="measured")
        assert counting.counts(Entry(made, Feasibility(op, problem)), Settings()) is expected


def test_a_using_block_counts_nothing(make_op):
    slow = Slow(make_op, 500)
    call = slow.call(3.0)
    with autokern.using(max_error=0.1):
        for _ in range(100):
            call(A)
    assert slow.calls == {"stock": 100, "exact": 0}


def test_products_of_a_model_are_those_of_the_library(monkeypatch):
    model, counted, stock = regression(850), [], linear_operator.utils.linear_cg

    def counting_cg(closure, *args, **kwargs):
        counted.append(0)

        def product(vectors):
            counted[-1] += 1
            return closure(vectors)

        return stock(product, *args, **kwargs)

    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(linear_operator.utils, "linear_cg", counting_cg)
        step(model)
    torch.manual_seed(0)
    with autokern.enabled(), autokern.using(force={"exact_log_prob": "stock", "inv_quad_logdet": "stock"}):
        before = inside.products
        step(model)
        assert inside.products - before == counted[0]
    assert counted[0] > 22


def test_a_model_whose_stock_iterates_gets_exact_gradients_by_default(monkeypatch):
    model = regression(1000)
    with gpytorch.settings.max_cholesky_size(10**6):
        truth, slopes = step(model)
    _, loose = step(model)
    assert (loose - slopes).norm() > 1e-2 * slopes.norm()
    dispatch.reset(Settings(calibrate="never", home=Path(os.environ["AUTOKERN_HOME"])))
    with autokern.enabled():
        loss, gradient = step(model)
    torch.testing.assert_close(loss, truth, rtol=1e-9, atol=1e-9)
    assert (gradient - slopes).norm() < 1e-4 * slopes.norm()
    assert math.isfinite(loss)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("candidate", ["fused", "recursive", "arrays"])
def test_a_matrix_without_a_factor_is_left_to_conjugate_gradients(candidate, monkeypatch):
    model = regression(820, noise=0.1)
    torch.manual_seed(0)
    expected, slopes = step(model)
    with autokern.enabled(), autokern.using(force={"exact_log_prob": candidate}):
        failed = []

        def indefinite(*args):
            failed.append(args)
            raise NotPSDError("as where rounding leaves no factor")

        monkeypatch.setattr(likelihood, "log_prob", indefinite)
        monkeypatch.setattr(array_density, "log_prob", indefinite)
        torch.manual_seed(0)
        loss, gradient = step(model)
        with gpytorch.settings.max_cholesky_size(10**6), pytest.raises(NotPSDError):
            step(model)
    assert len(failed) == 2
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(gradient, slopes, rtol=0.1, atol=0.1 * slopes.abs().max().item())


def test_a_looser_tolerance_is_an_order(monkeypatch):
    from autokern.hooks import solver_choice

    assert solver_choice.regime(1000) == solver_choice.ITERATIVE
    with gpytorch.settings.cg_tolerance(0.01):
        assert solver_choice.regime(1000) == solver_choice.ITERATIVE
    with gpytorch.settings.cg_tolerance(10):
        assert solver_choice.regime(1000) == solver_choice.ORDERED
