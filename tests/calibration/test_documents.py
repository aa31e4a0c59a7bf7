"""What the docs show of recorded hosts is what the scripts write."""

from __future__ import annotations

import example
import machines
import pytest

from autokern.core.problem import Problem
from autokern.tuning.profile import Profile, Timing, Trial


@pytest.mark.parametrize("script", [example, machines], ids=lambda module: module.__name__)
def test_what_the_docs_say_of_recorded_hosts_is_what_the_scripts_write(script, one_thread):
    assert script.main(["--check"]) == 0, f"run calibration/{script.__name__}.py"


@pytest.fixture
def with_a_gpu():
    """The profile of a machine that does not exist: decompositions below 512 columns are faster on its CPU."""
    trials = []
    for n in (64, 128, 256, 1024, 2048):
        cpu, there = 1e-9 * n**2.5, 512e-9 * n**1.5
        stock, other, name = (cpu, there, "native") if n <= 128 else (there, cpu, "cpu")
        timings = {"stock": Timing(stock), name: Timing(other, other / stock, 0.01, 5)}
        trials.append(Trial(Problem(op="qr", m=n, n=n, device="cuda"), timings))
    batch = {"stock": Timing(8.0), "choleskyqr2": Timing(0.1, 0.0125, 0.01, 5)}
    trials.append(Trial(Problem(op="qr", m=3, n=3, batch=8192, device="cuda", dtype="float32"), batch))
    gpu = {"kind": "cuda", "name": "A GPU"}
    fields = {"cpu": {"model": "A CPU", "threads": 4}, "accelerators": [gpu]}
    fields["versions"] = dict.fromkeys(("torch", "gpytorch", "linear_operator"), "1.0")
    return Profile(host=fields, trials=trials, created="2026-01-01T00:00:00Z")


def test_the_page_of_a_machine_with_a_gpu_says_what_thresholds_cost(with_a_gpu):
    text = "\n".join(machines.section("a-gpu", with_a_gpu))
    assert "## A GPU, A CPU, 4 threads" in text
    assert "| `qr` | cuda | float32 | 8192 × 3 × 3 | choleskyqr2 | 8e+03 | 80.00 |" in text
    assert machines.rule_costs(with_a_gpu.trials, 512, "float64") == [1.0] * 5
    assert machines.rule_costs(with_a_gpu.trials, 128, "float64") == [1, 1, pytest.approx(2), 1, 1]
    assert machines.rule_costs(with_a_gpu.trials, 2048, "float64") == [1, 1, 1, pytest.approx(2), pytest.approx(4)]
    assert "| CPU up to 2048 (before linear_operator 0.5.3) | float64 | 5 | 1.52 | 4.0 |" in text
    assert "| CPU up to 128 (since) | float64 | 5 | 1.15 | 2.0 |" in text
