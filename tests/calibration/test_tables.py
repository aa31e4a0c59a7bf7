"""What gains.py, ranks.py and closures.py compute; all ways of a closure compute the same."""

import closures
import gains
import numpy as np
import pytest
import ranks


def test_rows_of_dispatched_calls_are_judged_by_the_other_half() -> None:
    half = {
        name: type("Timing", (), {"ratio": ratio, "seconds": 1.0})
        for name, ratio in {
            "stock": 1.0,
            "fast": 0.5,
            **{f"dispatched {side}": 0.6 for side in gains.SIDES[1:]},
        }.items()
    }
    assert gains._row("p", [half, half])["full"] == pytest.approx(1.2)


def test_the_model_of_costs():
    assert ranks.predicted(1000, 1, 1e6, 1e-3, 1e9) == 1.0
    assert ranks.predicted(1000, 4, 1e6, 1e-3, 1e9) == pytest.approx(0.25 + 1.5 * 8 * 1000 * 11 / 1e9 + 12e-3)


@pytest.fixture
def case():
    return closures.Case(15)


@pytest.mark.parametrize("name", ["lapack", "jax"])
def test_the_arithmetic_alone_is_that_of_botorch(case, name):
    if name == "jax":
        pytest.importorskip("jax")
    way = {"lapack": closures.by_lapack, "jax": closures.by_jax}[name](case)
    for point in (case.start(), 1.3 * case.start()):
        value, slopes = way(point)
        expected, expected_slopes = case.closure()(point)
        assert value == pytest.approx(float(expected), rel=1e-7)  # the priors of BoTorch are in single precision
        np.testing.assert_allclose(slopes, expected_slopes, rtol=1e-6, atol=1e-8)
