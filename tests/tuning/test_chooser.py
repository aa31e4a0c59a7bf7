"""chooser.py: what a profile knows of a problem, and what other machines measured: trees and trials in the package."""

import math
import pkgutil

import msgspec
import pytest
from support.bases import fit_base, pack
from support.synthetic import SIZES, measured, square, trials, with_candidates

from autokern.core.problem import Problem
from autokern.core.registry import registered
from autokern.core.settings import Settings
from autokern.system import host
from autokern.tuning import chooser, store
from autokern.tuning.chooser import Chooser, Shipped, fitted, load, unpacked
from autokern.tuning.profile import Kept, Profile, Timing, Trial, group_key, key_of

FAST = {"fast": 0.5}


@pytest.fixture
def op(make_op):
    return with_candidates(make_op)


@pytest.fixture
def elsewhere(op):
    """What other hosts measured: the other one is fastest, and stock faster than `fast`."""
    return {"synthetic@cpu": fit_base(op, [trials({"fast": 1.2, "other": 0.7})] * 2)}


def test_a_few_trials_are_no_knowledge_unless_they_are_all_there_are(op):
    few, enough = (measured(FAST, sizes) for sizes in (SIZES[:3], SIZES[:5]))
    assert not Chooser(few, {}).knows(square(64))
    assert Chooser(enough, {}).knows(square(64))
    assert not Chooser(enough, {}).knows(square(64, dtype="float32"))
    few.levels[group_key(*square(64).group)] = "quick"
    assert Chooser(few, {}).knows(square(64))
    assert not Chooser(Profile(levels=few.levels), {}).knows(square(64)), "a level without trials is none"


def test_errors_are_the_worst_of_like_problems_near_by(op):
    def rough(n: int, error: float | None, **more) -> Trial:
        return Trial(square(n, **more), {"stock": Timing(1.0), "sloppy": Timing(0.1, 0.1, relative_error=error)})

    found = [rough(64, 1e-6), rough(90, 1e-5), rough(1024, 1e-3), rough(64, 1e-2, variant="rows")]
    known = Chooser(Profile(trials=found), {})
    assert known.relative_error(op, "sloppy", square(64)) == 1e-5
    assert known.relative_error(op, "sloppy", square(64, variant="rows")) == 1e-2
    assert known.relative_error(op, "sloppy", square(64, variant="columns")) is None
    assert known.relative_error(op, "fast", square(64)) is None
    beyond = known.relative_error(op, "sloppy", square(4096))
    assert 3e-3 < beyond < 1e-2, "doubled for each octave"


def test_the_nearest_trial_gives_seconds(op):
    known = Chooser(Profile(trials=trials(FAST)), {})
    near = known.nearest(op, square(512))
    assert (near.trial.problem, near.octaves, near.here) == (square(512), 0, True)
    assert near.seconds == near.trial.timings["stock"].seconds
    carried = known.nearest(op, square(4096))
    assert carried.trial.problem == square(1024)
    assert carried.octaves > 1
    assert 20 < carried.seconds / carried.trial.timings["stock"].seconds <= 65, "about by the flops"


def test_trials_of_other_hosts_give_seconds_where_there_are_no_own_ones(op, elsewhere, monkeypatch):
    there = trials(FAST, [64, 128])
    monkeypatch.setattr(chooser, "recorded", lambda: chooser.Shipped(trials={"synthetic@cpu": b"packed"}))
    monkeypatch.setattr(chooser, "unpacked", {b"packed": there}.get)
    near = Chooser(Profile(), elsewhere).nearest(op, square(128))
    assert (near.here, near.octaves) == (False, 0)
    assert near.seconds == pytest.approx(2.2e-5, rel=0.01)
    assert Chooser(Profile(trials=trials(FAST, [1024])), elsewhere).nearest(op, square(128)).here
    assert Chooser(Profile(), {}).nearest(op, square(128)) is None
    assert Chooser(Profile(), elsewhere).nearest(op, square(128, device="cuda")) is None


def test_where_the_exam_kept_shipped_choices_they_answer(op, elsewhere):
    profile = measured(FAST)
    profile.kept.append(Kept("synthetic", "float64", "cpu", "", False, 40, 100, "shipped"))
    known = Chooser(profile, elsewhere)
    for n, instead in ((39, ""), (40, "shipped"), (100, "shipped"), (101, "")):
        assert known.instead(square(n)) == instead
        fast = known.estimates(square(n))["fast"]
        assert (fast.log_ratio > 0) == bool(instead)
        assert fast.source == ("other hosts" if instead else "measured")
    assert known.instead(square(64, dtype="float32")) == known.instead(square(64, device="cuda")) == ""
    assert Chooser(profile, {}).estimates(square(64)) == {}, "nothing is shipped: as where nothing is measured"


def test_a_profile_that_is_read_is_taken_as_it_is(op, tmp_path):
    """Trees were fitted when it was measured; none are fitted in a program, but to a recording without any."""
    recording = Profile(host={"cpu": {"model": "x"}}, fingerprint=host.current().fingerprint, trials=trials(FAST))
    profile = fitted(recording)
    store.save(Settings(home=tmp_path / "home"), profile)
    store.write_file(tmp_path / "pinned.json", profile)
    for settings in (Settings(home=tmp_path / "home"), Settings(profile=tmp_path / "pinned.json")):
        assert load(settings) == profile
    store.write_file(tmp_path / "recording.json", recording)
    assert load(Settings(profile=tmp_path / "recording.json")) == profile
    assert load(Settings(home=tmp_path / "home", deterministic=True)).trials == []
    assert load(Settings(home=tmp_path / "none")).fingerprint == host.current().fingerprint


PROBLEMS = (
    Problem(op="kernel_matrix", m=300, n=200, d=7, dtype="float32", variant="rbf/cross/ard", grad="theta/x"),
    Problem(op="kernel_matrix", m=2**20, n=1, d=1, batch=3, variant="matern52/same/iso"),
    Problem(op="kernel_matrix", m=5, n=5, d=2, device="cuda"),
    Problem(op="kernel_matmul", m=17, n=16, rhs=4),
)
_HONEST = chooser.recorded


@pytest.fixture
def ships(monkeypatch):
    """The package's own file, read afresh."""
    _HONEST.cache_clear()
    monkeypatch.setattr(chooser, "recorded", _HONEST)
    yield
    _HONEST.cache_clear()


def recording() -> Profile:
    trials = []
    for index, problem in enumerate(PROBLEMS):
        seconds = 10.0 ** (index - 6)
        timings = {"stock": Timing(seconds), "expanded": Timing(seconds * 0.123, 0.123, 0.01, 5)}
        timings |= {"slow": Timing(seconds * 45.6, 45.6)} if index % 2 else {}
        timings["rough"] = Timing(seconds * 0.01, 0.01, relative_error=1e-3)
        trials.append(Trial(problem, timings))
    return Profile(host={"cpu": {"model": "x"}, "remarks": {"memory_gib": 3.0}}, trials=trials)


def packed(hosts: list[Profile]) -> Shipped:
    return msgspec.msgpack.decode(pack(hosts), type=Shipped)


def test_trials_that_are_packed_come_out_to_half_a_percent_and_without_lower_precision():
    found = packed([recording()])
    assert found.hosts == [{"cpu": {"model": "x"}}], "remarks tell nothing of likeness"
    assert set(found.trials) == {"kernel_matrix@cpu", "kernel_matrix@cuda", "kernel_matmul@cpu"}
    trials = {t.problem: t for data in found.trials.values() for t in unpacked(data)}
    assert set(trials) == set(PROBLEMS)
    for known in recording().trials:
        there = trials[known.problem].timings
        assert set(there) == set(known.timings) - {"rough"}
        assert there["stock"].ratio == 1
        for name, timing in there.items():
            assert abs(math.log(timing.ratio / known.timings[name].ratio)) <= 0.0051
            assert abs(math.log(timing.seconds / known.timings[name].seconds)) <= 0.0101


def test_trees_that_are_packed_tell_the_mean_ratio_of_candidates_that_there_are(make_pair):
    op = make_pair("double")
    op.candidate("sloppy", accuracy="approximate")(lambda a: 2 * a)
    hosts = [Profile(trials=9 * trials({"gone": 0.1, "sloppy": 0.1, "other": r}, [4], op="double")) for r in (0.5, 0.7)]
    found = packed(hosts).forests["double@cpu"].estimates(square(4, "double"))
    assert set(found) == {"stock", "other"}
    assert found["other"].log_ratio == pytest.approx((math.log(0.5) + math.log(0.7)) / 2, abs=1e-3)
    assert found["other"].sigma == pytest.approx((math.log(0.7) - math.log(0.5)) / 2, rel=0.1)
    assert found["other"].source == "other hosts"


def test_a_file_that_a_bundler_left_behind_is_no_damage(ships, monkeypatch):
    monkeypatch.setattr(pkgutil, "get_data", lambda *place: None)
    assert chooser.recorded() == Shipped()


def test_what_the_package_ships_can_be_read(ships):
    found = chooser.recorded()
    assert len(found.hosts) == 5
    for key in found.trials:
        trials = unpacked(found.trials[key])
        assert trials
        assert all("stock" in t.timings and len(t.timings) > 1 for t in trials)
        assert {key_of(t.problem) for t in trials} == {key.removesuffix("/many")}
    assert all(forest.is_whole for forest in found.forests.values())
    assert set(found.forests) == set(found.trials)
    assert {key.split("@")[0] for key in found.trials} <= {op.name for op in registered()}


@pytest.mark.parametrize(("threads", "own"), [(2, False), (4, False), (5, True), (64, True)])
def test_machines_with_many_threads_are_told_by_such_machines(ships, threads, own):
    whole, here = chooser.recorded(), Profile(host={"cpu": {"torch_threads": threads}})
    forests = Chooser(here).shipped
    assert not [key for key in forests if key.endswith("/many")]
    assert forests["kernel_matmul@cpu"] is whole.forests["kernel_matmul@cpu" + "/many" * own]
    assert forests["kernel_matmul@cuda"] is whole.forests["kernel_matmul@cuda"]
    problem = Problem(op="kernel_matmul", m=1800, n=1800, d=5, rhs=2, dtype="float32", variant="rbf/same")
    found = Chooser(here).estimates(problem)
    assert (found["tiled-symmetric"].log_ratio > 0.5) is own


@pytest.mark.parametrize("cpu", [None, [], "x", {}, {"torch_threads": None}, {"torch_threads": "many"}])
def test_a_profile_whose_host_tells_no_number_of_threads_is_read_as_one_of_few(ships, cpu):
    told = Chooser(Profile(host={"cpu": cpu})).shipped
    assert told["kernel_matmul@cpu"] is chooser.recorded().forests["kernel_matmul@cpu"]


@pytest.mark.parametrize(("capability", "told"), [("9.0", {"float32", "float64"}), ("8.9", {"float32"})])
def test_other_hosts_tell_of_float64_on_gpus_that_compute_it_at_full_rate(ships, capability, told):
    here = Profile(host={"accelerators": [{"kind": "cuda", "capability": capability}]})
    problem = Problem(op="inv_quad_logdet", m=2000, n=2000, rhs=1, device="cuda", variant="cg", grad="a")
    estimates = {d: Chooser(here).estimates(problem.replace(dtype=d)) for d in ("float32", "float64")}
    assert {dtype for dtype, found in estimates.items() if "potri" in found} == told
