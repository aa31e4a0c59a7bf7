"""Replay every recorded host: what policy decides from a real machine's profile, on whatever machine this is.

Nothing is timed here: the figures are those that were recorded, so the outcome is the same everywhere.
"""

import math
from pathlib import Path

import pytest
from support.bases import Replayed

from autokern.cli import summary
from autokern.core.registry import get, known
from autokern.core.settings import Settings
from autokern.tuning.chooser import Chooser, fitted
from autokern.tuning.policy import decide
from autokern.tuning.profile import Profile, Trial
from autokern.tuning.store import read_file

HOSTS = sorted((Path(__file__).parents[1] / "calibration" / "hosts").glob("*.json"))

GONE = {
    "predict": "lazy-product rows@256 rows@1024 rows@4096",
    "kernel_matmul": (
        "dense tiled@512 tiled@2048 tiled-columns tiled-symmetric@1536 compiled compiled-symmetric cpu xla"
    ),
    "kernel_matrix": "symmetric vmap torchscript compiled cpu",
    "exact_log_prob": "recursive kronecker mixed merged cpu",
    "inv_quad_logdet": "recursive mixed",
    "cholesky": "cupy looped",
    "qr": "cupy looped",
}
"""Candidates that hosts were recorded with."""


@pytest.fixture(scope="module", params=HOSTS, ids=lambda path: path.stem)
def profile(request: pytest.FixtureRequest) -> Profile:
    return read_file(request.param)


def served(profile: Profile) -> list[Trial]:
    """The trials of ops that there still are."""
    return [t for t in profile.trials if known(t.problem.op)]


def replay(trial: Trial, chooser: Chooser) -> str:
    """Return the decision on a recorded trial among the candidates that could run there."""
    op = get(trial.problem.op)
    absent = frozenset(f"{op.name}={name}" for name in op.names() if name not in trial.usual)
    return decide(Replayed(op, trial.problem, chooser.profile), chooser, Settings(exclude=absent)).candidate


@pytest.fixture(scope="module")
def ratios(profile: Profile) -> list[tuple[float, float]]:
    """Pairs of recorded time over best and over stock, of what is decided on each recorded trial.

    Where stock is loose, an exact choice is compared with what is exact too, and with the time that it may take:
    samples take the least products.
    """
    chooser = Chooser(fitted(profile), {})
    found = []
    for trial in served(profile):
        op, problem, name = get(trial.problem.op), trial.problem, replay(trial, chooser)
        chosen = trial.timings.get(name, trial.timings["stock"]).ratio
        rivals, allowed = {n: t for n, t in trial.usual.items() if n in op.names()}, 1.0
        if op.may_cost(problem) > 1 and op[name].accuracy == "better":
            rivals = {n: t for n, t in rivals.items() if op[n].accuracy == "better"}
            allowed = op.may_cost(problem)
        found.append((chosen / min(t.ratio for t in rivals.values()), chosen / allowed))
    return found


@pytest.mark.skipif(not HOSTS, reason="no host has been recorded")
class TestRecordedHost:
    def test_ops_that_are_gone_are_ignored(self, profile: Profile) -> None:
        gone = {trial.problem.op for trial in profile.trials if not known(trial.problem.op)}
        assert gone <= {"cholesky_inverse", "eigh", "matmul", "pinverse_root", "solve_triangular"}
        assert not gone & {line.op for line in summary.known(profile).ops}

    def test_candidates_that_are_gone_are_ignored(self, profile: Profile) -> None:
        gone = {
            f"{trial.problem.op} {name}"
            for trial in served(profile)
            for name in trial.timings
            if name not in get(trial.problem.op).names()
        }
        threads = {name for name in gone if name.endswith(("@2", "@4", "@8", "@16"))}
        assert gone <= {*threads, *(f"{op} {name}" for op, names in GONE.items() for name in names.split())}
        left = {trial.problem: trial for trial in summary.present(profile).trials}
        for trial in served(profile):
            names = get(trial.problem.op).names()
            assert left[trial.problem].timings == {n: t for n, t in trial.timings.items() if n in names}

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
        some = served(profile)[:: max(1, len(profile.trials) // 20)]
        one, other = (Chooser(fitted(profile), {}) for _ in range(2))
        assert [replay(t, one) for t in some] == [replay(t, other) for t in reversed(some)][::-1]
