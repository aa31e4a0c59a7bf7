"""The tables of gains.py, ranks.py and closures.py; all ways of a closure compute the same."""

from __future__ import annotations

import closures
import gains
import numpy as np
import pytest
import ranks

RUN = {"cpu": "a CPU", "capability": "AVX2", "threads": 2, "date": "2026-01-02", "shipped": "another CPU"}
FIGURES = {
    "run": RUN,
    "programs": [{"program": "one", "off": [4.0, 8.0], "none": [2.0, 2.0], "quick": [2.0, 2.0], "full": [1.0, 4.0]}],
    "steps": [{"n": 20, "dtype": "float64", "off": 3.0, "none": 2.0, "quick": 1.5, "full": 1.0}],
    "overhead": [{"problem": "p", "seconds": 1.0, "none": 1.1, "quick": 1.05, "full": 1.01}],
}


def rows(figures: dict[str, object]) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in gains.tables(figures) if line.startswith("| ")]


def test_gains_are_stocks_time_over_autokerns_and_no_profile_over_a_profile() -> None:
    found = {(row[0], row[1]): row[2:] for row in rows(FIGURES)}
    assert found["1 programs after the imports", "stock over autokern, seconds"][2] == "4.00 (least 4.00)"
    assert found["the same", "no profile over profile, seconds"][1:] == ["1.00 (least 1.00)", "2.00 (least 2.00)"]
    assert found["the same", "no profile over profile, CPU seconds"][2] == "0.50 (least 0.50)"
    ratios = ["1.50 (least 1.50)", "2.00 (least 2.00)", "3.00 (least 3.00)"]
    assert next(cells for (what, _), cells in found.items() if what.startswith("training steps, float64")) == ratios
    (dispatched,) = (cells for (what, _), cells in found.items() if "random problems" in what)
    assert dispatched[0] == "1.100, p95 1.10"


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


@pytest.fixture
def results():
    jobs = []
    for what, (points, _) in ranks.WORKS.items():
        for count in (*ranks.COUNTS, *ranks.COUNTS[1::-1]):
            spent = {"processor": 7.0, "waited": 0.5, "collectives": 8, "bytes": 2_000_000, "mebibytes": 300.0}
            jobs.append({
                "what": what, "points": points, "ranks": count, "values": [2.0, 1.0 + (count > 1) * 1e-12],
                "seconds": [10.0 / count + len(jobs), 5.0 / count], "each": [spent] * count,
                "link": {"latency": 1e-4, "bandwidth": 2e9},
            })  # fmt: skip
    host = {"cpu": {"model": "a machine", "torch_threads": 2}}
    common = {"host": host, "versions": {"python": "3", "torch": "2"}, "date": "2026-01-01", "cores": 2, "rough": False}
    return {**common, "counts": list(ranks.COUNTS), "jobs": jobs}


def test_the_tables(results, refreshed):
    text = ranks.block(results)
    assert (
        "| product and its gradients, n = 60,000 | 1 | 15.00 s | 1.00 | 7.00 s | 0.50 s | 8 | 2.0 MB | 300 MiB |"
        in text
    )
    assert "| product and its gradients, n = 60,000 | 2 | 8.50 s | 1.76 |" in text
    assert "| 5e-13 |" in text
    assert "a simulation and not as a measurement" in text
    assert "Rough" not in text
    assert "Rough" in ranks.block({**results, "rough": True})
    assert refreshed(ranks, results, "ranks").partition("-->\n")[2] == f"{text}<!-- /ranks -->\nafter\n"


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
