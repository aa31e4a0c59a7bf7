"""problem.py and profile.py: what is written is what is read, merging loses nothing, and any bytes are judged whole."""

import copy
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autokern.core.errors import ProfileError
from autokern.core.problem import Problem
from autokern.tuning.forest import Forest
from autokern.tuning.profile import SCHEMA, Ban, Kept, Profile, Timing, Trial, decode, encode

NAMES = ["stock", "cpu", "tiled"]

problems = st.builds(
    Problem,
    op=st.sampled_from(["qr", "cholesky"]),
    m=st.integers(1, 5),
    n=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "float64"]),
    device=st.sampled_from(["cpu", "cuda"]),
    grad=st.sampled_from(["", "a"]),
)
timings = st.builds(
    Timing,
    seconds=st.floats(1e-7, 1e3),
    ratio=st.floats(1e-3, 1e3),
    noise=st.floats(0, 1),
    rounds=st.integers(1, 20),
    error=st.floats(0, 10),
)
trials = st.builds(Trial, problems, st.dictionaries(st.sampled_from(NAMES), timings, min_size=1, max_size=3))
bans = st.builds(
    Ban,
    st.just("qr"),
    st.sampled_from(NAMES),
    st.just("float64"),
    st.sampled_from(["cpu", "cuda"]),
    st.text(max_size=9),
)
profiles = st.builds(
    Profile,
    host=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=2),
    fingerprint=st.sampled_from(["", "ab12", "cd34"]),
    trials=st.lists(trials, max_size=4, unique_by=lambda t: t.problem),
    banned=st.lists(bans, max_size=2, unique_by=lambda b: (b.candidate, b.device)),
    setup=st.dictionaries(st.sampled_from(["qr.cpu", "cholesky.cpu"]), st.floats(0, 100), max_size=2),
    levels=st.dictionaries(
        st.sampled_from(["qr@cpu", "cholesky/float64@cuda"]), st.sampled_from(["quick", "full"]), max_size=2
    ),
    created=st.sampled_from(["", "2024-01-01T00:00:00Z", "2025-06-01T00:00:00Z"]),
)


def test_a_problem_is_a_key_and_prints_what_matters():
    p = Problem(op="qr", m=3, n=2)
    assert p == Problem(op="qr", m=3, n=2)
    assert hash(p) == hash(Problem(op="qr", m=3, n=2))
    assert len({p, p.replace(grad="a"), p.replace(), p.replace(variant="rows")}) == 3
    with pytest.raises(AttributeError):
        p.m = 4
    assert pickle.loads(pickle.dumps(p)) == copy.deepcopy(p) == p
    assert str(p) == "qr(m=3, n=2, float64, cpu)"
    p = Problem(op="kernel_matrix", m=5, n=6, d=2, batch=3, grad="theta", variant="rbf/cross/ard")
    assert str(p) == "kernel_matrix(m=5, n=6, d=2, batch=3, float64, cpu, rbf/cross/ard, grad=theta)"


@given(profiles)
def test_what_is_encoded_is_decoded(profile):
    text = msgspec.json.encode(profile)
    assert decode(text) == profile
    assert b"disturbed" not in text, "it is left out where there was none"
    assert decode(encode(profile)) == profile


WHOLE = Profile(
    trials=[
        Trial(Problem(op="qr", m=3, n=2, d=4, rhs=5, batch=6), {"stock": Timing(1e-3, 1.5, 0.1, 3, 0.5, None, 0.2)})
    ],
    setup={"qr.cpu": 1.0},
    schema=SCHEMA,
)


def test_trials_are_decoded_when_they_are_asked_for(monkeypatch):
    decoded, plain, kept = [], msgspec.json.decode, encode(WHOLE)
    noted = lambda text, **form: decoded.append(form["type"]) or plain(text, **form)  # noqa: E731
    monkeypatch.setattr(msgspec.json, "decode", noted)
    found = decode(kept)
    assert decoded == [Profile]
    assert pickle.loads(pickle.dumps(found)) == found == WHOLE
    assert (len(found.trials), found.trials[0]) == (1, WHOLE.trials[0])


def _with(path: str, value: object) -> bytes:
    """The JSON of a small valid profile with one value replaced; `value` is put in as raw JSON."""
    tree = {**msgspec.to_builtins(WHOLE), "schema": SCHEMA}
    target, _, field = path.partition("/")
    trial = tree["trials"][0]
    nodes = {"timing": trial["timings"]["stock"], "problem": trial["problem"], "trial": trial}
    nodes |= {"setup": tree["setup"], "top": tree}
    nodes[target][field] = "@@"
    return msgspec.json.encode(tree).replace(b'"@@"', str(value).encode())


TIMINGS = ("seconds", "ratio", "noise", "rounds", "error")
NO_TIMES = ("NaN", "Infinity", "-Infinity", "1e999", "-1", "null", '"1"', "true", "[]")
NO_SIZES = ("-1", str(2**41), "1e30", str(10**40), "1.5", "null")
REFUSED = [
    *((f"timing/{field}", value, ".") for field in TIMINGS for value in NO_TIMES),
    *((f"timing/{field}", value, "Expected `float`") for field in TIMINGS[:2] for value in ("1e10", "0", "1e-13")),
    ("timing/noise", "1e200", "Expected `float` < 1"),
    *((f"problem/{field}", value, ".") for field in ("m", "n", "d", "rhs", "batch") for value in NO_SIZES),
    *((f"problem/{field}", "0", "impossible size") for field in ("m", "n", "batch")),
    *((f"{of}/surprise", "1", ".") for of in ("timing", "problem", "trial", "top")),
    *(("setup/qr.cpu", value, ".") for value in ("-1", "NaN", "1e999", '"x"')),
]


@pytest.mark.parametrize(("path", "value", "told"), REFUSED)
def test_impossible_values_are_refused(path, value, told):
    with pytest.raises(ProfileError, match=told):
        decode(_with(path, value))
    for field in TIMINGS:
        decode(_with(f"timing/{field}", 2))


def test_too_many_trials_are_refused():
    trial = Trial(Problem(op="qr"), {"stock": Timing(1.0)})
    with pytest.raises(ProfileError, match="length <= 50000"):
        decode(msgspec.json.encode(Profile(trials=[trial] * 50_001)))


def as_sets(profile: Profile) -> tuple:
    found = {(t.problem, name): timing for t in profile.trials for name, timing in t.timings.items()}
    banned = {(b.op, b.candidate, b.dtype, b.device): b for b in profile.banned}
    return found, banned, profile.setup, profile.levels, profile.created, profile.host, profile.fingerprint


def test_merge_repeats_no_choice_of_the_exam():
    """Of an op without trees of its own: files are merged with themselves whenever something is saved."""
    kept = Profile(kept=[Kept("qr", "float64", "cpu", "", False, 1, 9, "stock")])
    assert kept.merge(kept).merge(kept).kept == kept.kept


def test_merge_lets_no_older_trees_replace_those_of_more_trials():
    """A program that began before a calibration saves its profile with the trees of then."""
    kept = Kept("qr", "float64", "cpu", "", False, 1, 9, "stock")
    old = Profile(forests={"qr@cpu": Forest(["stock"], [], trials={"float64": 5})}, kept=[kept])
    new = Profile(forests={"qr@cpu": Forest(["stock"], [], trials={"float64": 5, "float32": 5})})
    for merged in (old.merge(new), new.merge(old)):
        assert (merged.forests, merged.kept) == (new.forests, [])
    same = Profile(forests={"qr@cpu": Forest(["cpu"], [], trials={"float64": 5})})
    assert old.merge(same).forests == same.forests


@pytest.mark.parametrize(("names", "stays"), [(["stock"], True), (["stock", "cpu"], False)])
def test_merge_keeps_the_date_of_a_fruitless_calibration_until_trials_compare_something(names, stays):
    trials = [Trial(Problem(op="qr", m=n, n=n), {name: Timing(1.0) for name in names}) for n in range(1, 10)]
    tried = Profile(fruitless={"qr/float64@cpu": "2026-01-01T00:00:00Z"})
    for merged in (tried.merge(Profile(trials=trials)), Profile(trials=trials).merge(tried)):
        assert bool(merged.fruitless) is stays


@given(profiles, profiles, profiles)
def test_merge_is_associative_and_keeps_every_trial_and_lets_the_other_win(a, b, c):
    assert as_sets(a.merge(b).merge(c)) == as_sets(a.merge(b.merge(c)))
    mine, other, both = as_sets(a), as_sets(b), as_sets(a.merge(b))
    for index in range(3):
        assert both[index] == mine[index] | other[index]
    assert len({t.problem for t in a.merge(b).trials}) == len(a.merge(b).trials)
    for key in {**mine[3], **other[3]}:
        assert both[3][key] == ("full" if "full" in (mine[3].get(key), other[3].get(key)) else "quick")
    assert as_sets(a.merge(Profile())) == as_sets(Profile().merge(a)) == as_sets(a.merge(a)) == mine
