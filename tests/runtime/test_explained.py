"""What `explain` tells of answers that iterate, and of the errors of what was not chosen, on real models."""

import warnings

import gpytorch
import msgspec
import pytest
import torch
from linear_operator import settings as library
from linear_operator.utils.warnings import NumericalWarning
from support.models import points, rough, step
from support.outcomes import count
from support.threads import in_threads

import autokern
from autokern.core import decision as solved
from autokern.core.decision import Decision
from autokern.core.problem import WITHIN, Error, Problem
from autokern.core.registry import registered
from autokern.density import iterated_density
from autokern.model.libraries import TOLERANCE
from autokern.ops import _candidates as iterations
from autokern.runtime import dispatch, memo

N = 1010
LOOSE = Problem(op="exact_log_prob", m=N, n=N, d=2, variant="rbf/cg", grad="theta")


def decided(op):
    """The decisions of an op, with their calls."""
    return [(decision, calls) for decision, calls in autokern.explain().decisions if decision.problem.op == op]


@pytest.mark.parametrize("measured", [False, True])
def test_a_density_that_iterates_tells_what_it_reached_however_often_it_is_asked(measured, monkeypatch):
    of = rough(N)
    with autokern.enabled(), autokern.using(force={"exact_log_prob": "preconditioned"}):
        step(of)
        monkeypatch.setattr(dispatch.session(), "measured", lambda table: table)
        for entry in memo.current.get().memo["exact_log_prob"].values() if measured else ():
            entry.ledger.seconds = float("inf")
            entry.check_at(entry.count + 1)
        of.covar_module.base_kernel.lengthscale = 0.25
        step(of)
        inner = decided("exact_log_prob")
    for decision, calls in (*inner, *decided("exact_log_prob"), *decided("exact_log_prob")):
        (found,) = decision.solved
        assert (calls, found.solves, found.missed) == (2, 2, 0)
        assert 0 < found.residual <= TOLERANCE[torch.float64] == found.goal
        assert 0 < found.iterations <= 40
        assert found.preconditioner in ("pivoted", "vecchia")
        assert found.columns == library.num_trace_samples.value()
        assert 0 < found.standard_error < 10
        assert str(found) in str(decision)
        assert str(found) in str(decision)
        assert f"preconditioner {found.preconditioner}" in decision._repr_html_()
        assert msgspec.json.decode(msgspec.json.encode(decision), type=Decision) == decision
    for text in (str(autokern.explain()), autokern.explain()._repr_html_()):
        assert "log density known to" in text
        assert "by 10 probes" in text
    frame = pytest.importorskip("pandas") and autokern.explain().to_frame()
    row = frame[frame.op == "exact_log_prob"].iloc[0]
    told = ("residual", "iterations", "preconditioner")
    assert [row[name] for name in told] == [getattr(found, name) for name in told]
    assert frame[frame.op == "kernel_matmul"].residual.isna().all()


def test_what_does_not_converge_is_told(monkeypatch):
    monkeypatch.setattr(iterated_density, "_LONGEST", 2)
    monkeypatch.setattr(iterations, "LONGEST", 2)
    of = rough(N, noise=1e-3)
    with (
        autokern.enabled(),
        autokern.using(force={"exact_log_prob": "preconditioned", "inv_quad_logdet": "stock"}),
        library.max_cg_iterations(20),
        warnings.catch_warnings(record=True) as heard,
    ):
        warnings.simplefilter("always")
        step(of)
        ((decision, _),) = decided("exact_log_prob")
    assert decision.solved
    assert all(one.missed == 1 and one.residual > one.goal for one in decision.solved)
    assert [w.category for w in heard if "CG terminated" in str(w.message)] == [NumericalWarning]
    assert not [w for w in heard if "autokern" in str(w.message)]
    assert "stopped before the 1e-05 that was asked for" in str(decision)


FORMLESS = {"predict": "stock", "solve": "preconditioned", "kernel_matmul": "tiled"}


def test_predictions_that_iterate_are_tight_after_few_products_and_tell_what_they_reached():
    of, x = rough(N).eval(), points(5, seed=1)
    with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
        mean, variance = rough(N).eval()(x).mean, rough(N).eval()(x).variance
    with autokern.enabled(), autokern.using(force=FORMLESS), torch.no_grad():
        before, state = count("kernel_matmul"), torch.random.get_rng_state()
        found = of(x)
        torch.testing.assert_close(found.mean, mean, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found.variance, variance, rtol=1e-2, atol=2e-5)
        assert 0 < count("kernel_matmul") - before < 60
        assert torch.random.get_rng_state().equal(state)
        ((predicted, _),) = decided("predict")
        of_solves = [decision.solved for decision, _ in decided("solve")]
    (own,) = predicted.solved
    served = [decision.candidate for decision, _ in decided("solve")]
    assert served == ["preconditioned"] * 2  # 992 rows would be too few
    assert own.solves == len(of_solves) == 2  # of the targets, and of the test points
    assert own.columns == 5
    assert own.standard_error is None
    assert own == solved.overall([*of_solves[0], *of_solves[1]])
    assert own.residual <= TOLERANCE[torch.float64]


def test_threads_of_one_key_tell_all_of_their_solves():
    def work(of):
        with autokern.using(force={"exact_log_prob": "preconditioned"}):
            for _ in range(2):
                step(of)

    with autokern.enabled():
        in_threads(work, [rough(N, seed=seed) for seed in range(2)])
    ((decision, calls),) = decided("exact_log_prob")
    assert calls == 4
    assert sum(one.solves for one in decision.solved) == 4


A = torch.ones(4, 4, dtype=torch.float64)


def test_what_is_measured_beside_calls_is_not_told(make_op):
    inner, outer = (make_op(name, approximates=lambda problem: True) for name in ("inner", "around"))
    part = dispatch.route(inner)
    inner.candidate("stock")(lambda a: solved.note(solved.Solved(1e-6, 3, "pivoted", 1)) or 2 * a)

    def run(a):
        with memo.apart(dispatch.session().settings):
            part(a)
        return part(a)

    outer.candidate("stock", parts=True)(run)
    dispatch.route(outer)(A)
    assert [decision.solved[0].solves for decision, _ in decided("around")] == [1]


@pytest.mark.parametrize(
    "op", [op for op in registered() if op.approximates(LOOSE.replace(op=op.name))], ids=lambda op: op.name
)
def test_what_stock_is_worth_is_told_where_it_iterates(op):
    problem = next(p for p in op.grid("full", "float64", "cpu") if "cg" in p.words)
    worth = op.expected_error(problem, op.stock)
    found = dispatch.explain(problem)
    assert found.costs["stock"].error == worth.word
    assert worth.words in str(found)
    exact = problem.replace(variant=problem.variant.replace("cg", "cholesky"))
    assert op.expected_error(exact, op.stock) is None


def test_each_candidate_has_the_error_that_is_its_own():
    found = dispatch.explain(LOOSE)
    words = {name: cost.error for name, cost in found.costs.items()}
    assert words["fused"] == WITHIN.word
    assert words["stock"] == words["matrix-free"] == "10-2000 %"
    assert words["preconditioned"] == "residual 1e-05"
    text = str(found)
    assert "standard error" in text
    assert text.count("gradients are off by 10 % to 2000 %") == 1
    single = dispatch.explain(LOOSE.replace(dtype="float32"))
    assert single.costs["preconditioned"].error == "residual 1e-04"
    html = found._repr_html_()
    assert "10-2000 %" in html
    assert "error of preconditioned" in html
    frame = pytest.importorskip("pandas") and found.to_frame()
    assert frame.set_index("candidate").error["preconditioned"] == "residual 1e-05"


def test_an_error_that_a_plugin_cannot_tell_is_within_the_bound(make_op):
    op = make_op("plugged")
    op.candidate("stock")(lambda a: 2 * a)
    op.candidate("theirs", error=lambda problem: Error("rough", "theirs is rough"))(lambda a: 2 * a)
    op.candidate("broken", error=lambda problem: 1 / 0)(lambda a: 2 * a)
    op.listed[1:] = [candidate.of_plugin("p") for candidate in op.listed[1:]]
    costs = dispatch.explain(Problem(op="plugged", m=4, n=4)).costs
    assert {name: cost.error for name, cost in costs.items()} == {
        "stock": WITHIN.word, "theirs": "rough", "broken": WITHIN.word,
    }  # fmt: skip


def test_parts_stand_below_the_composite_call_that_made_them(make_op):
    inner, middle, outer = make_op("inner"), *(make_op(name, composite=True) for name in ("middle", "outer"))
    calls = {op: dispatch.route(op) for op in (inner, middle, outer)}
    inner.candidate("stock")(lambda a: 2 * a)
    middle.candidate("stock")(lambda a: calls[inner](calls[inner](a)))
    outer.candidate("stock")(lambda a: calls[middle](a) + calls[inner](a))
    for op in (inner, middle, outer, outer):
        calls[op](A)
    told = [line[21:].partition(":")[0] for line in str(autokern.explain()).splitlines() if " by " in line]
    assert [line.replace("\N{NO-BREAK SPACE}", ".") for line in told] == [
        "outer by stock", "..inner by stock", "..middle by stock", "....inner by stock",
        "inner by stock", "middle by stock", "..inner by stock",
    ]  # fmt: skip
    places = {(decision.problem.op, *decision.within): calls for decision, calls in autokern.explain().decisions}
    around, between = "outer by stock", "middle by stock"
    assert places == {
        ("outer",): 2, ("inner", around): 2, ("middle", around): 2, ("inner", around, between): 4,
        ("inner",): 1, ("middle",): 1, ("inner", between): 2,
    }  # fmt: skip
    assert sum(autokern.stats()["inner"].values()) == 9
    assert "\N{NO-BREAK SPACE}inner by stock" in autokern.explain()._repr_html_()
    dispatch.session().forget()
    calls[outer](A)
    assert dict(autokern.stats()["inner"]) == {"stock": 12}
    assert sum(count for _, count in decided("inner")) == 12


def test_a_part_is_told_where_its_composite_call_raised_or_is_forgotten(make_op):
    inner, outer = make_op("inner"), make_op("outer", composite=True)
    part = dispatch.route(inner)
    inner.candidate("stock")(lambda a: 2 * a)

    @outer.candidate("stock")
    def stock(a):
        part(a)
        raise KeyError

    with pytest.raises(KeyError):
        dispatch.route(outer)(A)
    part(A)
    found = decided("inner")
    assert sorted(decision.within for decision, _ in found) == [(), ("outer by stock",)]
    assert str(autokern.Explanation(found)).count("inner by stock") == 2
