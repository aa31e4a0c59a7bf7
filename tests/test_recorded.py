"""Replay every recorded host: what policy decides from a real machine's profile, on whatever machine this is.

Nothing is timed here: the figures are those that were recorded, so the outcome is the same everywhere.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "calibration"))

import example
import machines

from autokern.costs import CostModel
from autokern.op import get, known
from autokern.policy import decide
from autokern.problem import Problem
from autokern.profile import Profile, Timing, Trial
from autokern.settings import Settings
from autokern.store import read_file

HOSTS = sorted((Path(__file__).parents[1] / "calibration" / "hosts").glob("*.json"))


@pytest.fixture(scope="module", params=HOSTS, ids=lambda path: path.stem)
def profile(request: pytest.FixtureRequest) -> Profile:
    return read_file(request.param)


def replay(trial: Trial, model: CostModel) -> str:
    """Return the decision on a recorded trial among the candidates that could run there."""
    op = get(trial.problem.op)
    absent = frozenset(f"{op.name}={name}" for name in op.names() if name not in trial.usual)
    return decide(trial.problem, op, model, Settings(exclude=absent)).candidate


@pytest.fixture(scope="module")
def ratios(profile: Profile) -> list[tuple[float, float]]:
    """Pairs of recorded time over best and over stock, of what is decided on each recorded trial."""
    model = CostModel(profile)
    found = []
    for trial in profile.trials:
        chosen = trial.timings.get(replay(trial, model), trial.timings["stock"]).ratio
        found.append((chosen / min(t.ratio for t in trial.usual.values()), chosen))
    return found


@pytest.mark.skipif(not HOSTS, reason="no host has been recorded")
class TestRecordedHost:
    def test_its_ops_and_candidates_are_registered(self, profile: Profile) -> None:
        for trial in profile.trials:
            assert known(trial.problem.op)
            assert set(trial.timings) <= set(get(trial.problem.op).names())

    def test_it_names_no_person_and_no_place(self, profile: Profile) -> None:
        text = str(profile.host)
        assert "/home" not in text
        assert "hostname" not in text.lower()

    def test_decisions_are_near_the_best_that_was_recorded(self, ratios: list[tuple[float, float]]) -> None:
        geomean = math.exp(sum(math.log(over_best) for over_best, _ in ratios) / len(ratios))
        assert geomean <= 1.05

    def test_decisions_are_hardly_ever_slower_than_stock(self, ratios: list[tuple[float, float]]) -> None:
        slower = sum(over_stock > 1.05 for _, over_stock in ratios)
        assert slower <= 0.02 * len(ratios)

    def test_decisions_are_deterministic(self, profile: Profile) -> None:
        some = profile.trials[:: max(1, len(profile.trials) // 20)]
        one, other = CostModel(profile), CostModel(profile)
        assert [replay(t, one) for t in some] == [replay(t, other) for t in reversed(some)][::-1]

    def test_thresholds_can_be_read(self, profile: Profile) -> None:
        for op, dtype, device in {trial.problem.group for trial in profile.trials}:
            for crossover in profile.thresholds(op, device=device, dtype=dtype):
                assert crossover.size > 0
                assert crossover.below != crossover.above

    def test_dtypes_may_be_given_as_torch_has_them(self, profile: Profile) -> None:
        assert profile.thresholds("qr", "cpu", torch.float64) == profile.thresholds("qr", "cpu", "float64")  # type: ignore[arg-type]


# --- docs that are made from recorded hosts ---------------------------------------------------------------------------


@pytest.mark.parametrize("script", [example, machines], ids=lambda module: module.__name__)
def test_what_the_docs_say_of_recorded_hosts_is_what_the_scripts_write(script):
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
