"""closures.py: all ways compute the same, and the table holds what was measured."""

from __future__ import annotations

import closures
import numpy as np
import pytest


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


def test_the_table(refreshed):
    seconds = {"off": 1.5e-3, "on": 1.2e-4, "lapack": 6e-5}
    figure = {"ratio": 12.5, "quartiles": [12.0, 13.0], "difference": 1e-12}
    results = {
        "closures": [{"n": 20, "seconds": seconds, "on": figure}],
        "fits": [{"n": 20, "off": 0.06, "on": 0.01, **figure, "ratio": 6.0, "stock_difference": 2e-9}],
        "host": {"cpu": {"model": "a machine", "torch_threads": 2}},
        "versions": {"python": "3", "torch": "2"},
        "date": "2026-01-01",
    }
    text = refreshed(closures, results, "closures")
    assert (
        "| loss and gradient in BoTorch's closure, n = 20 | 1.50 ms | 120 µs | 12.50× (12.00–13.00) | 60.0 µs |  |"
        in text
    )
    assert "| BoTorch fit, n = 20 | 60.0 ms | 10.0 ms | 6.00× (12.00–13.00) | | | 1e-12 (2e-09) |" in text
    assert "a machine" in text
