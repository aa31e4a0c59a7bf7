"""chooser.py: what a profile and the shipped trees know of a problem."""

from __future__ import annotations

import pytest
from support.bases import fit_base
from support.synthetic import SIZES, measured, square, trials, with_candidates

from autokern.core.settings import Settings
from autokern.system import host
from autokern.tuning import chooser, store
from autokern.tuning.chooser import Chooser, fitted, load
from autokern.tuning.profile import Kept, Profile, Timing, Trial, group_key

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
    recording = Profile(host={"cpu": "x"}, fingerprint=host.current().fingerprint, trials=trials(FAST))
    profile = fitted(recording)
    store.save(Settings(home=tmp_path / "home"), profile)
    store.write_file(tmp_path / "pinned.json", profile)
    for settings in (Settings(home=tmp_path / "home"), Settings(profile=tmp_path / "pinned.json")):
        assert load(settings) == profile
    store.write_file(tmp_path / "recording.json", recording)
    assert load(Settings(profile=tmp_path / "recording.json")) == profile
    assert load(Settings(home=tmp_path / "home", deterministic=True)).trials == []
    assert load(Settings(home=tmp_path / "none")).fingerprint == host.current().fingerprint
