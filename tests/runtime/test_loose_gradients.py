"""Exact gradients where stock's are loose."""

import gpytorch
import pytest
import torch
from linear_operator.utils.errors import NotPSDError
from support import models
from support.models import rough
from support.synthetic import measured, seconds_of_stock, square

import autokern
from autokern.core.problem import Error, Feasibility, Problem
from autokern.core.registry import get
from autokern.core.settings import Settings
from autokern.density import array_density, gaussian
from autokern.ops import _candidates as iterations
from autokern.tuning.chooser import Chooser
from autokern.tuning.measuring import measurable
from autokern.tuning.policy import decide, described

LOOSE = Problem(op="exact_log_prob", m=1500, n=1500, d=3, variant="rbf/cg", grad="theta")
NONE = Settings()


@pytest.fixture
def loose(make_op):
    """An op of which stock iterates to a loose tolerance."""
    made = make_op(
        "loose",
        approximates=lambda problem: True,
        may_cost=lambda problem: 3.0,
        expected_error=lambda problem, candidate: Error("loose", "stock is loose") if candidate.loose else None,
    )
    made.candidate("stock")(lambda a: a)
    made.candidate("exact", accuracy="better")(lambda a: a)
    made.candidate("formless", as_stock=True)(lambda a: a)
    return made


def chosen(op, orders=NONE, **ratios):
    chooser = Chooser(measured(ratios, (4, 8, 16), op=op.name))
    return described(decide(Feasibility(op, square(8, op.name)), chooser, orders), chooser, orders)


@pytest.mark.parametrize(
    ("exact", "formless", "expected"),
    [
        (0.9, 1.0, "exact"),
        (2.9, 1.0, "exact"),
        (2.9, 0.5, "exact"),  # what is as loose as stock may be faster
        (3.2, 1.0, "stock"),
        (3.2, 0.5, "formless"),
    ],
)
def test_exact_is_preferred_up_to_what_it_may_cost(loose, exact, formless, expected):
    found = chosen(loose, exact=exact, formless=formless)
    assert found.candidate == expected
    assert found.remark.startswith("stock is loose")
    assert found.predicted["stock"] == pytest.approx(seconds_of_stock(8), rel=0.05)
    if expected == "exact":
        assert "in no more than 3 times its time on a sample" in found.reason
    else:
        assert "exact would be exact, in" in found.remark


def test_samples_tell_nothing_of_what_iterates_tightly_and_it_serves_where_stock_does_not_fit(make_op):
    need = lambda problem: 2**40  # noqa: E731
    op = make_op("system", approximates=lambda problem: True, default_candidate=lambda problem: "tight", memory=need)
    op.candidate("stock")(lambda a: a)
    op.candidate("formless", as_stock=True, memory=lambda problem: 1)(lambda a: a)
    op.candidate("tight", accuracy="better", as_stock=True, memory=lambda problem: 1)(lambda a: a)
    assert [op[name].tight for name in ("formless", "tight")] == [False, True]
    for ratios in ({}, {"tight": 9.0}):  # as a profile may have it that says so all the same
        for orders in (NONE, Settings(memory=2**20)):
            assert chosen(op, orders, formless=0.5, **ratios).candidate == "tight"
    for level in ("quick", "full"):
        assert [c.name for c in measurable(op, square(8, "system"), level)] == ["stock", "formless"]
        large = LOOSE.replace(m=2600, n=2600)
        assert "preconditioned" not in [c.name for c in measurable(get("exact_log_prob"), large, level)]


def test_what_is_usual_is_read_from_the_study():
    op, known = get("exact_log_prob"), iterations.counted()
    assert known.least >= 20
    assert known.points == sorted(known.points)
    assert 0 < known.errors[0] < known.errors[1]
    assert op.may_cost(LOOSE) >= op.may_cost(LOOSE.replace(device="cuda")) > 1.3
    assert op.may_cost(LOOSE) == op.may_cost(LOOSE.replace(n=1000)) > op.may_cost(LOOSE.replace(n=known.points[-1]))
    assert op.may_cost(LOOSE.replace(n=10**5)) == 1
    assert "gradients are off by" in op.expected_error(LOOSE, op.stock).words
    exact = LOOSE.replace(variant="rbf/cholesky")
    assert (op.may_cost(exact), op.expected_error(exact, op.stock)) == (1, None)


MOST = iterations.counted().exact
DEFAULTS = [
    ({"n": 900}, "fused"), ({"n": MOST}, "fused"),
    ({"n": MOST + 1}, "preconditioned"), ({"n": 20_000}, "preconditioned"), ({"dtype": "float32"}, "fused"),
    ({"batch": 2}, "fused"), ({"variant": "linear+rbf/cg"}, "stock"), ({"device": "cuda"}, "stock"),
    ({"n": 400_000, "device": "cuda"}, "stock"), ({"n": 300, "variant": "rbf/cholesky"}, "arrays"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), DEFAULTS)
def test_exact_is_the_default_up_to_some_thousand_points_and_iterations_beyond(changes, expected):
    assert MOST >= 2000
    sizes = {"m": changes["n"]} if "n" in changes else {}
    assert get("exact_log_prob").default_candidate(LOOSE.replace(**changes, **sizes)) == expected


def step(model):
    loss, slopes = models.step(model)
    return loss, torch.cat([slope.flatten() for slope in slopes])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("candidate", ["fused", "arrays"])
def test_a_matrix_without_a_factor_is_left_to_conjugate_gradients(candidate, monkeypatch):
    model = rough(820, noise=0.1)
    torch.manual_seed(0)
    expected, slopes = step(model)
    with autokern.enabled(), autokern.using(force={"exact_log_prob": candidate}):
        failed = []

        def indefinite(*args):
            failed.append(args)
            raise NotPSDError("as where rounding leaves no factor")

        monkeypatch.setattr(gaussian, "log_prob", indefinite)
        monkeypatch.setattr(array_density, "log_prob", indefinite)
        torch.manual_seed(0)
        loss, gradient = step(model)
        with gpytorch.settings.max_cholesky_size(10**6), pytest.raises(NotPSDError):
            step(model)
    assert len(failed) == 2
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(gradient, slopes, rtol=0.1, atol=0.1 * slopes.abs().max().item())
