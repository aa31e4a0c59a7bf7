"""recorded.py and others.py: what other machines measured, packed into the package, and the hosts that are asked."""

from __future__ import annotations

import math
import pkgutil
import warnings
import zlib

import msgspec
import pytest
from autokern.tuning.prefitted import Prefitted
from autokern.tuning.residuals import places_of

from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.core.settings import Settings
from autokern.system import host
from autokern.tuning import kin, others, recorded, store
from autokern.tuning.profile import Profile, Timing, Trial

PROBLEMS = (
    Problem(op="kernel_matrix", m=300, n=200, d=7, dtype="float32", variant="rbf/cross/ard", grad="theta/x"),
    Problem(op="kernel_matrix", m=2**20, n=1, d=1, batch=3, variant="matern52/same/iso"),
    Problem(op="kernel_matrix", m=5, n=5, d=2, device="cuda"),
    Problem(op="matmul", m=17, n=16, rhs=4),
)


@pytest.fixture(autouse=True)
def fresh():
    recorded.hosts.cache_clear()
    yield
    recorded.hosts.cache_clear()


def profile(**more) -> Profile:
    trials = []
    for index, problem in enumerate(PROBLEMS):
        seconds = 10.0 ** (index - 6)
        timings = {"stock": Timing(seconds), "fast": Timing(seconds * 0.123, 0.123, 0.01, 5)}
        timings |= {"slow": Timing(seconds * 45.6, 45.6)} if index % 2 else {}
        timings["rough"] = Timing(seconds * 0.01, 0.01, relative_error=1e-3)
        trials.append(Trial(problem, timings))
    return Profile(host=more.pop("host", {"cpu": {"model": "x"}, "remarks": {"memory_gib": 3.0}}), trials=trials)


def test_what_is_packed_comes_out_to_half_a_percent_and_without_lower_precision():
    (found,) = recorded.read(recorded.pack([profile()]))
    assert found.fields == {"cpu": {"model": "x"}}, "remarks tell nothing of likeness"
    assert set(found.pools) == {"kernel_matrix@cpu", "kernel_matrix@cuda", "matmul@cpu"}
    assert found.trials("qr", "cpu") == []
    trials = {t.problem: t for key in found.pools for t in found.trials(*key.split("@"))}
    assert set(trials) == set(PROBLEMS)
    for known in profile().trials:
        there = trials[known.problem].timings
        assert set(there) == set(known.timings) - {"rough"}
        assert there["stock"].ratio == 1
        for name, timing in there.items():
            assert abs(math.log(timing.ratio / known.timings[name].ratio)) <= 0.0051
            assert abs(math.log(timing.seconds / known.timings[name].seconds)) <= 0.0101
            assert timing.noise == (0 if name == "stock" else recorded.NOISE)


def test_trials_without_a_choice_are_left_out_and_the_same_gives_the_same_bytes():
    timings = (
        {"stock": Timing(1.0)},
        {"fast": Timing(1.0)},
        {"stock": Timing(1.0), "r": Timing(1.0, relative_error=0)},
    )
    useless = Profile(trials=[Trial(p, t) for p, t in zip(PROBLEMS, timings, strict=False)])
    (found,) = recorded.read(recorded.pack([useless]))
    assert found.pools == {}
    assert recorded.pack([profile()]) == recorded.pack([profile()])


@pytest.mark.parametrize(
    "damage", [lambda data: data[:3000], lambda data: b"", lambda data: data.replace(b"x\xda", b"x\xdb")]
)
def test_a_damaged_file_is_left_aside_with_one_warning(monkeypatch, damage):
    monkeypatch.setattr(pkgutil, "get_data", lambda *place, data=pkgutil.get_data: damage(data(*place)))
    recorded._warn_of_damage.cache_clear()
    op = get("matmul")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for shipped in recorded.hosts():
            told = Prefitted(shipped)
            assert told.told(op, op.stock, [PROBLEMS[3]], places_of(op, [PROBLEMS[3]])) is None
            assert told.wins("qr", "cpu", "stock") == []
    assert [str(each.message).partition(", ")[0] for each in heard] == ["recorded.msgpack"]


@pytest.mark.parametrize(
    "change",
    [
        lambda pool: {
            "fits": {name: msgspec.structs.replace(f, weights=f.weights[:-1]) for name, f in pool.fits.items()}
        },
        lambda pool: {"fits": {name: fit for name, fit in pool.fits.items() if name != "stock"}},
        lambda pool: {"seconds": pool.seconds[1:]},
        lambda pool: {"words": []},
        lambda pool: {"sizes": {**pool.sizes, "another": pool.sizes["n"]}},
    ],
)
def test_parts_that_do_not_fit_together_are_left_aside(change):
    recorded._warn_of_damage.cache_clear()
    shipped = recorded.hosts()[0]
    pool = msgspec.structs.replace(whole := shipped._pool("cholesky", "cpu"), **change(whole))
    changed = recorded.RecordedHost({}, {"cholesky@cpu": zlib.compress(msgspec.msgpack.encode(pool))})
    with pytest.warns(recorded.AutokernWarning, match="install autokern again"):
        assert changed.recording("cholesky", "cpu") is None
    assert changed.trials("cholesky", "cpu") == []


def test_what_the_package_ships_can_be_read():
    assert recorded.hosts()
    for shipped in recorded.hosts():
        assert kin.likeness(shipped.fields, shipped.fields) == 1
        for key in shipped.pools:
            trials = shipped.trials(*key.split("@"))
            assert trials
            assert all("stock" in t.timings and len(t.timings) > 1 for t in trials)
            assert {t.problem.op for t in trials} == {key.split("@")[0]}


def test_who_is_asked(tmp_path, monkeypatch):
    """The most alike, few, and none where the user wants decisions that depend on nothing else."""
    here, home = host.current(), tmp_path / "home"
    fields = [msgspec.json.decode(msgspec.json.encode(here.fields)) for _ in range(6)]
    for index, found in enumerate(fields):
        found["cpu"]["threads"] = here.fields["cpu"]["threads"] * 2 ** (index + 1)
    shipped = recorded.read(recorded.pack([profile(host=f) for f in fields]))
    unlike = recorded.read(recorded.pack([profile(host={"cpu": {}})]))
    monkeypatch.setattr(others, "_shipped", lambda: (*unlike, *shipped[::-1]))
    found = others.others(Settings(home=home), "cpu")
    assert [one.likeness for one in found] == pytest.approx([0.7]), "the others are less than three quarters as alike"
    monkeypatch.setattr(others, "_NEAR_BEST", 0.0)
    found = others.others(Settings(home=home), "cpu")
    assert [one.likeness for one in found] == pytest.approx([0.7, 0.49, 0.343, 0.2401])
    assert others.others(Settings(home=home), "mps") == [], "none of them measured there"
    store.save(Settings(home=home), msgspec.structs.replace(profile(host=here.fields), fingerprint="0" * 32))
    assert others.others(Settings(home=home), "cpu")[0].likeness == pytest.approx(0.7), "what is kept here is no prior"
    assert others.others(Settings(home=home, deterministic=True), "cpu") == []
    assert others.others(Settings(home=home, profile=tmp_path / "pinned.json"), "cpu") == []
