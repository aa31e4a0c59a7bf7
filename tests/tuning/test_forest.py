"""forest.py: trees evaluate as scikit-learn's do, survive files bit for bit, and damaged ones are refused."""

import math
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.tree import DecisionTreeRegressor
from support.synthetic import square

from autokern.core.errors import ProfileError
from autokern.core.problem import Problem
from autokern.tuning import forest as fitting
from autokern.tuning.forest import UNIT, UNKNOWN, Forest, Limits, Tree, octaves, words
from autokern.tuning.profile import Profile, decode

NAMES, WORDS = ["stock", "fast"], ["grad:x", "rbf"]
WIDE = Limits([0.0] * 7, [40.0] * 7, ["rbf", "grad:x"])


def met(limits: Limits = WIDE, dtypes: tuple[str, ...] = ("float32", "float64")) -> dict[str, Limits]:
    """The same limits of own trials, whatever the gradients."""
    return {f"{dtype}/{grad}": limits for dtype in dtypes for grad in ("", "x", "theta/x")}


problems = st.builds(
    Problem,
    op=st.just("synthetic"),
    m=st.integers(1, 4000),
    n=st.integers(1, 4000),
    d=st.integers(0, 30),
    rhs=st.integers(0, 100),
    batch=st.integers(1, 50),
    dtype=st.sampled_from(["float32", "float64"]),
    variant=st.sampled_from(["", "rbf", "rbf+matern/ard", "matern"]),
    grad=st.sampled_from(["", "x", "theta/x"]),
)


def packed(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}h", *values)


def leaf(*values: int) -> Tree:
    """A tree of a single leaf."""
    return Tree([-1], [0.0], [0], packed(*values), packed(*[0] * len(values)))


def stump(feature: int = 1, threshold: float = 6.0) -> Tree:
    """Problems of up to 64 columns to the left, larger ones to the right."""
    return Tree([feature, -1, -2], [threshold, 0.0, 0.0], [2, 0, 0], packed(0, -500, 0, 300), packed(0, 10, 0, 10))


def by_base(tree: Tree, **more) -> Forest:
    return Forest(**{"candidates": NAMES, "words": WORDS, "base": tree, "of_base": 2, "seen": WIDE, **more})


def by_own(*trees: Tree, **more) -> Forest:
    told = {"own": list(trees), "of_own": 2, "met": met(), "trials": {"float64": 9}}
    return Forest(**{"candidates": NAMES, "words": WORDS, **told, **more})


@settings(max_examples=25, deadline=None)
@given(st.lists(problems, min_size=3, max_size=25), st.lists(problems, max_size=8), st.integers(0, 99), st.booleans())
def test_trees_evaluate_as_those_of_scikit_learn(seen, others, seed, extra):
    """Means to the unit in which leaves keep them; places at a threshold aside, which is rounded to four digits."""
    forest = Forest(NAMES, sorted(set().union(*map(words, seen))))
    places = np.array([forest.place(p, words(p)) for p in seen])
    values = np.random.default_rng(seed).normal(size=(len(seen), 2))
    kind = ExtraTreesRegressor(2, max_features=1.0, random_state=seed) if extra else DecisionTreeRegressor()
    model = kind.fit(places, values)
    fitted = model.estimators_ if extra else [model]
    trees = [fitting.tree(one.tree_, one.apply(places), values) for one in fitted]
    assert by_own(*trees, words=forest.words).is_whole
    for problem in [*seen, *others]:
        place = forest.place(problem, words(problem))
        splits = [(f, t) for tree in trees for f, t in zip(tree.feature, tree.threshold, strict=True) if f >= 0]
        if all(abs(place[f] - t) > 2e-4 for f, t in splits):
            ours = np.mean([tree.leaf(place, 2)[0] for tree in trees], 0) * UNIT
            assert ours == pytest.approx(model.predict(np.array([place]))[0], abs=UNIT)


def share(error: float) -> float:
    """The share of a correction with this error, beside the deviation between hosts."""
    return 1 / (1 + (error / 0.2) ** 2)


def test_own_trees_correct_the_base_and_their_disagreement_is_the_uncertainty():
    forest = by_base(stump(), own=[leaf(0, 100), leaf(0, 300)], of_own=2, met=met(), trials={"float64": 5})
    left, right = (forest.estimates(square(n))["fast"] for n in (64, 65))
    correction = 0.2 * share(0.1 / 2**0.5)  # the mean of two trees
    assert (left.log_ratio, right.log_ratio) == pytest.approx((-0.5 + correction, 0.3 + correction))
    assert left.sigma == right.sigma == pytest.approx(0.1, rel=1e-3)
    assert forest.estimates(square(64))["stock"] == (0.0, 0.0, "measured")


def test_trials_of_another_dtype_or_gradient_correct_nothing():
    single = met(dtypes=("float32",))
    forest = by_base(stump(), own=[leaf(0, 100)], of_own=2, met=single, trials={"float32": 9})
    assert forest.estimates(square(64))["fast"][::2] == (-0.5, "other hosts")
    corrected = pytest.approx(-0.5 + 0.1 * share(0.03))
    assert forest.estimates(square(64, dtype="float32"))["fast"][::2] == (corrected, "measured")
    assert by_own(leaf(0, 100), met=single).estimates(square(64)) == {}
    assert by_own(leaf(0, 100), met={"float64/x": WIDE}).estimates(square(64)) == {}
    assert by_own(leaf(0, 100), met={"float64/": WIDE}).estimates(square(64, batch=4)) == {}, "nor those of one model"
    assert by_own(leaf(0, 100), met={"float64//batch": WIDE}).estimates(square(64, batch=4))


@pytest.mark.parametrize(
    "make", [lambda limits: by_base(stump(), seen=limits), lambda limits: by_own(stump(), met=met(limits))]
)
def test_far_beyond_the_measured_sizes_there_is_no_estimate_and_a_little_beyond_it_is_doubtful(make):
    low, high = ([round(x, 3) for x in octaves(square(n, d=1, rhs=1))] for n in (32, 1024))
    forest = make(Limits(low, high, ["rbf", "grad:x"]))
    within, little, more = (forest.estimates(square(n, d=1, rhs=1))["fast"].sigma for n in (1024, 1100, 2048))
    assert within < little < more < 0.2
    assert forest.estimates(square(8)) == forest.estimates(square(4096)) == {}
    assert forest.estimates(square(1024, rhs=64)) == {}, "each size counts, also those that no tree splits at"
    assert forest.estimates(square(1024, batch=64)) == {}


def test_words_that_were_not_measured_add_doubt():
    forest = by_own(stump())
    sigmas = [forest.estimates(square(64, variant=v))["fast"].sigma for v in ("rbf", "matern", "matern/ard")]
    assert sigmas == sorted(set(sigmas))


def test_own_trees_that_contradict_each_other_and_leaves_without_trials_say_nothing_where_there_is_no_base():
    apart = [leaf(0, -700), leaf(0, 300)]
    assert by_own(*apart).estimates(square(64)) == {}
    assert "fast" in by_base(stump(), own=apart, of_own=2, met=met()).estimates(square(64))
    assert by_base(leaf(0, UNKNOWN)).estimates(square(64)) == {}
    assert by_own(leaf(0, UNKNOWN)).estimates(square(64)) == {}
    some = by_own(leaf(0, UNKNOWN), leaf(0, 400), leaf(0, 200)).estimates(square(64))["fast"]
    assert some.log_ratio == pytest.approx(0.3), "trees that do not know one say nothing of it"
    assert Forest(NAMES, []).estimates(square(64)) == {}


def test_sizes_are_where_trees_split():
    both = by_base(stump(0, 6.5), own=[stump(1, 9.0), stump(2, 3.0), stump(6, 11.25)], of_own=2, met=met())
    assert both.sizes == {90, 512, 8, 2435}
    others = by_base(stump(3, 2.0), own=[stump(4), stump(5), stump(7, 0.5), stump(8, 0.5)], of_own=2, met=met())
    assert others.sizes == set(), "dimensions, right-hand sides, batches, dtypes and words are no sizes of matrices"


GOOD = stump()
DAMAGED = {
    "a node that is its own right child": by_base(msgspec.structs.replace(GOOD, right=[0, 0, 0])),
    "a right child that is the left one": by_base(msgspec.structs.replace(GOOD, right=[1, 0, 0])),
    "a right child that is not there": by_base(msgspec.structs.replace(GOOD, right=[3, 0, 0])),
    "a negative right child": by_base(msgspec.structs.replace(GOOD, right=[-2, 0, 0])),
    "a left child that is not there": by_base(msgspec.structs.replace(GOOD, feature=[1, -1, 1])),
    "a cycle": by_own(Tree([1, 1, -1], [6.0, 5.0, 0.0], [2, 0, 0], packed(0, 1), packed(0, 1))),
    "no nodes": by_base(Tree([], [], [], b"", b"")),
    "fewer thresholds than nodes": by_base(msgspec.structs.replace(GOOD, threshold=[6.0])),
    "fewer children than nodes": by_base(msgspec.structs.replace(GOOD, right=[2])),
    "a row that is not there": by_base(msgspec.structs.replace(GOOD, feature=[1, -1, -3])),
    "a short row": by_base(msgspec.structs.replace(GOOD, values=GOOD.values[:-1], spread=GOOD.spread[:-1])),
    "a base without spread": by_base(msgspec.structs.replace(GOOD, spread=b"")),
    "a short row of an own tree": by_own(msgspec.structs.replace(GOOD, values=GOOD.values[:5])),
    "a feature that is not there": by_base(stump(10)),
    "a word that is not there": by_base(stump(8), words=[]),
    "more columns than candidates": by_base(stump(), candidates=["stock"]),
    "no columns": by_base(stump(), of_base=0),
    "own trees without columns": by_own(stump(), of_own=-2),
    "limits of too few sizes": by_base(stump(), seen=Limits([0.0], [9.0], [])),
    **{f"a threshold of {x}": by_base(stump(threshold=x)) for x in (math.nan, math.inf, -math.inf)},
    "limits of own trees of too few sizes": by_own(stump(), met=met(Limits([0.0] * 7, [9.0], []))),
}


@pytest.mark.parametrize("forest", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_forests_are_refused(forest):
    assert not msgspec.msgpack.decode(msgspec.msgpack.encode(forest), type=Forest).is_whole
    with pytest.raises(ProfileError):
        decode(msgspec.json.encode(Profile(forests={"synthetic@cpu": forest})))


trees = st.builds(
    Tree,
    st.lists(st.integers(-4, 11), max_size=5),
    st.lists(st.floats(-2, 14), max_size=5),
    st.lists(st.integers(-2, 6), max_size=5),
    st.binary(max_size=16),
    st.binary(max_size=16),
)


@settings(max_examples=60, deadline=None)
@given(trees, trees, st.integers(-1, 4), st.integers(-1, 4), problems)
def test_whatever_is_not_refused_can_be_evaluated(base, own, of_base, of_own, problem):
    forest = by_base(base, of_base=of_base, own=[own], of_own=of_own, met=met(), trials={"float64": 1})
    try:
        read = decode(msgspec.json.encode(Profile(forests={"synthetic@cpu": forest})))
    except ProfileError:
        return
    assert all(math.isfinite(e.log_ratio) for e in read.forests["synthetic@cpu"].estimates(problem).values())
    assert read.forests["synthetic@cpu"].sizes is not None
