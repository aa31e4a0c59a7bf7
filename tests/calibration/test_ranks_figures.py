"""ranks.py: the tables hold what was measured, and the model of costs is what the text says."""

from __future__ import annotations

import pytest
import ranks


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
