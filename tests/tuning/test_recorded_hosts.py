"""chooser.py: what other machines measured, packed into the package as trees and as trials."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Iterator

import msgspec
import pytest
from support.bases import pack

from autokern.core.problem import Problem
from autokern.core.registry import registered
from autokern.tuning import chooser
from autokern.tuning.chooser import Chooser, Shipped, unpacked
from autokern.tuning.profile import Profile, Timing, Trial, key_of

PROBLEMS = (
    Problem(op="kernel_matrix", m=300, n=200, d=7, dtype="float32", variant="rbf/cross/ard", grad="theta/x"),
    Problem(op="kernel_matrix", m=2**20, n=1, d=1, batch=3, variant="matern52/same/iso"),
    Problem(op="kernel_matrix", m=5, n=5, d=2, device="cuda"),
    Problem(op="kernel_matmul", m=17, n=16, rhs=4),
)
_HONEST = chooser.recorded


@pytest.fixture(autouse=True)
def ships(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package's own file, read afresh."""
    _HONEST.cache_clear()
    monkeypatch.setattr(chooser, "recorded", _HONEST)
    yield
    _HONEST.cache_clear()


def profile(**more) -> Profile:
    trials = []
    for index, problem in enumerate(PROBLEMS):
        seconds = 10.0 ** (index - 6)
        timings = {"stock": Timing(seconds), "expanded": Timing(seconds * 0.123, 0.123, 0.01, 5)}
        timings |= {"slow": Timing(seconds * 45.6, 45.6)} if index % 2 else {}
        timings["rough"] = Timing(seconds * 0.01, 0.01, relative_error=1e-3)
        trials.append(Trial(problem, timings))
    return Profile(host=more.pop("host", {"cpu": {"model": "x"}, "remarks": {"memory_gib": 3.0}}), trials=trials)


def read(data: bytes) -> Shipped:
    return msgspec.msgpack.decode(data, type=Shipped)


def test_trials_that_are_packed_come_out_to_half_a_percent_and_without_lower_precision():
    found = read(pack([profile()]))
    assert found.hosts == [{"cpu": {"model": "x"}}], "remarks tell nothing of likeness"
    assert set(found.trials) == {"kernel_matrix@cpu", "kernel_matrix@cuda", "kernel_matmul@cpu"}
    trials = {t.problem: t for data in found.trials.values() for t in unpacked(data)}
    assert set(trials) == set(PROBLEMS)
    for known in profile().trials:
        there = trials[known.problem].timings
        assert set(there) == set(known.timings) - {"rough"}
        assert there["stock"].ratio == 1
        for name, timing in there.items():
            assert abs(math.log(timing.ratio / known.timings[name].ratio)) <= 0.0051
            assert abs(math.log(timing.seconds / known.timings[name].seconds)) <= 0.0101


def test_trees_that_are_packed_tell_the_mean_ratio_of_candidates_that_there_are(make_op):
    op = make_op("double")
    for name in ("stock", "other"):
        op.candidate(name)(lambda a: 2 * a)
    op.candidate("rough", accuracy="approximate")(lambda a: 2 * a)
    timings = {"stock": Timing(1.0), "gone": Timing(0.1, 0.1), "rough": Timing(0.1, 0.1, relative_error=1e-3)}
    hosts = [
        Profile(trials=[Trial(Problem(op="double", m=4, n=4), {**timings, "other": Timing(r, r)}) for _ in range(9)])
        for r in (0.5, 0.7)
    ]
    found = read(pack(hosts)).forests["double@cpu"].estimates(Problem(op="double", m=4, n=4))
    assert set(found) == {"stock", "other"}
    assert found["other"].log_ratio == pytest.approx((math.log(0.5) + math.log(0.7)) / 2, abs=1e-3)
    assert found["other"].sigma == pytest.approx((math.log(0.7) - math.log(0.5)) / 2, rel=0.1)
    assert found["other"].source == "other hosts"


def test_a_file_that_a_bundler_left_behind_is_no_damage(monkeypatch):
    monkeypatch.setattr(pkgutil, "get_data", lambda *place: None)
    assert chooser.recorded() == Shipped()


def test_what_the_package_ships_can_be_read():
    found = chooser.recorded()
    assert len(found.hosts) == 4
    for key in found.trials:
        trials = unpacked(found.trials[key])
        assert trials
        assert all("stock" in t.timings and len(t.timings) > 1 for t in trials)
        assert {key_of(t.problem) for t in trials} == {key}
    assert all(forest.is_whole for forest in found.forests.values())
    assert set(found.forests) == set(found.trials)
    assert {key.split("@")[0] for key in found.trials} <= {op.name for op in registered()}


@pytest.mark.parametrize(("capability", "told"), [("9.0", {"float32", "float64"}), ("8.9", {"float32"})])
def test_other_hosts_tell_of_float64_on_gpus_that_compute_it_at_full_rate(capability: str, told: set[str]) -> None:
    here = Profile(host={"accelerators": [{"kind": "cuda", "capability": capability}]})
    problem = Problem(op="inv_quad_logdet", m=2000, n=2000, rhs=1, device="cuda", variant="cg", grad="a")
    estimates = {d: Chooser(here).estimates(problem.replace(dtype=d)) for d in ("float32", "float64")}
    assert {dtype for dtype, found in estimates.items() if "potri" in found} == told
