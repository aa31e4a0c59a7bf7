"""Forests: regression trees from a problem's sizes and words to log(candidate's time / stock's time).

One tree, the base, holds other hosts' measurements. A few extremely randomized trees (Geurts, Ernst and Wehenkel 2006)
of the machine's own trials correct it; their disagreement weights a correction against the deviation between hosts.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from autokern.core.problem import Problem

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from autokern.core.op import Op
    from autokern.tuning.profile import Trial

NOISE = 0.05  # a smaller predicted gain, in log units, counts as no gain
CONFIDENCE = 0.3  # standard deviations that must lie between a prediction and a tie
UNIT = 1e-3  # log units of the integers that store values
UNKNOWN = -32768  # the integer of a candidate that no trial of a leaf measured
_FAR = 1.5  # octaves beyond the measured sizes from which on nothing is estimated
_LEAST = 0.03  # least uncertainty, even where trees agree: machines drift from one hour to the next
_HOSTS = 0.2  # least standard deviation between hosts
_UNSURE = 0.3  # uncertainty from which on own trees give no estimate without a base: trials are few or contradict
_DOUBT = 0.1  # uncertainty that each octave beyond the measured sizes, and each unseen word, adds


class Estimate(NamedTuple):
    """Prediction of a candidate's time relative to stock's."""

    log_ratio: float  # log(time / stock's time)
    sigma: float  # its standard deviation
    source: str  # "measured" or "extrapolated" from this machine's trials, or "other hosts"


class Tree(msgspec.Struct, frozen=True, array_like=True):
    """A binary tree in preorder: the left child of a node is the next node."""

    feature: list[int]  # the feature that a node compares, or -1 - row for a leaf
    threshold: list[float]  # values up to it go left
    right: list[int]  # the right child of a node
    values: bytes  # a row for each leaf with a 16-bit integer for each candidate: mean log ratio
    spread: bytes  # the same for its standard deviation

    def leaf(self, place: Sequence[float], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the leaf of a place in feature space: integer means and standard deviations by candidate."""
        feature, node = self.feature, 0
        while (column := feature[node]) >= 0:
            node = node + 1 if place[column] <= self.threshold[node] else self.right[node]
        form, start = f"<{count}h", 2 * count * (-1 - column)
        return struct.unpack_from(form, self.values, start), struct.unpack_from(form, self.spread, start)

    def is_whole(self, columns: int, count: int) -> bool:
        """Whether every path through the tree ends in a valid row."""
        nodes, size = len(self.feature), len(self.values)
        return (
            nodes == len(self.threshold) == len(self.right) > 0 < count
            and size == len(self.spread)
            and all(map(math.isfinite, self.threshold))
            and all(
                -(size // (2 * count)) <= feature < 0 or (0 <= feature < columns and node + 1 < right < nodes)
                for node, (feature, right) in enumerate(zip(self.feature, self.right, strict=True))
            )
        )


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """The range of each size in octaves, and the words, of the problems that trees were fitted to."""

    low: list[float]
    high: list[float]
    words: list[str]

    def beyond(self, place: Sequence[float], own: Collection[str]) -> tuple[float, float]:
        """Return a problem's distance from the range in octaves, and the uncertainty by distance and new words."""
        outside = max(0.0, *(max(low - x, x - high) for low, x, high in zip(self.low, place, self.high, strict=False)))
        return outside, _DOUBT * (outside + len(set(own).difference(self.words)))


class Forest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The trees of one op on one device kind."""

    candidates: list[str]  # columns of the leaves' rows; rows of the base may have only the first ones
    words: list[str]  # features behind the sizes and the dtype
    base: Tree | None = None  # log ratios measured by other hosts
    of_base: int = 0  # number of candidates in the rows of the base
    of_own: int = 0  # number of candidates in the rows of the own trees
    seen: Limits | None = None  # of the problems that the base was fitted to
    met: dict[str, Limits] = {}  # of the own trees' problems by `kind`: a trial says little of another kind
    own: list[Tree] = []  # corrections of the base by this machine's trials; log ratios of candidates not in the base
    trials: dict[str, int] = {}  # number of own trials by dtype
    floor: int = 0  # elements below which only stock is chosen, by `chooser.floor`

    def place(self, problem: Problem, own: Collection[str]) -> list[float]:
        """Return the features of a problem with these words."""
        return [*octaves(problem), problem.dtype == "float32", *(word in own for word in self.words)]

    def told(self, place: Sequence[float]) -> dict[str, tuple[float, float]]:
        """Return mean and standard deviation by candidate from the base, at any distance from its problems."""
        if self.base is None:
            return {}
        rows = zip(self.candidates, *self.base.leaf(place, self.of_base), strict=False)
        return {name: (UNIT * mean, UNIT * width) for name, mean, width in rows if mean != UNKNOWN}

    def estimates(self, problem: Problem) -> dict[str, Estimate]:
        """Return Estimates by candidate, where similar problems were measured."""
        own, found = words(problem), dict[str, Estimate]()
        place = self.place(problem, own)
        told = self.told(place)
        octave, doubt = self.seen.beyond(place, own) if self.seen is not None else (_FAR, 0.0)
        if octave < _FAR:
            found = {n: Estimate(mean, max(width, _LEAST) + doubt, "other hosts") for n, (mean, width) in told.items()}
        met = self.met.get(kind(problem)) if self.own else None
        octave, doubt = met.beyond(place, own) if met is not None else (_FAR, 0.0)
        if octave < _FAR:
            source = "extrapolated" if octave > 0.5 else "measured"
            leaves = [zip(*tree.leaf(place, self.of_own), strict=True) for tree in self.own]
            for name, *pairs in zip(self.candidates, *leaves, strict=False):
                known = [(value, noise) for value, noise in pairs if value != UNKNOWN]
                if known:
                    mean = sum(value for value, _ in known) / len(known)
                    variance = sum((value - mean) ** 2 + noise**2 for value, noise in known) / len(known)
                    sigma = max(UNIT * math.sqrt(variance), _LEAST)
                    if sigma < _UNSURE or name in told:
                        base, others = told.get(name, (0.0, 0.0))[0], found.get(name)
                        error = sigma / math.sqrt(len(known)) + 2 * doubt  # of the mean correction
                        share = 1.0 if others is None else 1 / (1 + (error / max(others.sigma, _HOSTS)) ** 2)
                        found[name] = Estimate(base + share * UNIT * mean, sigma + doubt, source)
        if not found.keys() - {"stock"}:
            return {}
        found["stock"] = Estimate(0.0, 0.0, found["stock"].source if "stock" in found else "other hosts")
        return found

    @property
    def _trees(self) -> list[tuple[Tree, int]]:
        return [(tree, self.of_own) for tree in self.own] + ([(self.base, self.of_base)] if self.base else [])

    @property
    def is_whole(self) -> bool:
        """Whether every path through its trees ends in a valid row."""
        names, columns = len(self.candidates), 8 + len(self.words)
        limits = [*self.met.values(), *([self.seen] if self.seen else [])]
        return all(count <= names and tree.is_whole(columns, count) for tree, count in self._trees) and all(
            len(found.low) == len(found.high) == 7 for found in limits
        )

    @property
    def sizes(self) -> set[int]:
        """The sizes (largest dimension, n, m, or root of the elements) at which a tree of this forest splits."""
        splits = (pair for tree, _ in self._trees for pair in zip(tree.feature, tree.threshold, strict=True))
        return {math.floor(2.0 ** min(threshold, 40.0)) for feature, threshold in splits if feature in (0, 1, 2, 6)}


def kind(problem: Problem) -> str:
    """Return dtype and gradients of a problem, and whether it is a batch: the key of `Forest.met`."""
    return f"{problem.dtype}/{problem.grad}" + "/batch" * (problem.batch > 1)


def octaves(problem: Problem) -> tuple[float, ...]:
    """Return base-2 logs of a problem's sizes: larger dimension, n, m, d, rhs, batch, and the root of its elements."""
    n, m, d, rhs, batch = map(math.log2, (problem.n, problem.m, max(1, problem.d), max(1, problem.rhs), problem.batch))
    return max(n, m), n, m, d, rhs, batch, 0.5 * (n + m + batch)


def words(problem: Problem) -> set[str]:
    """Return the words of a problem, and the summands of words with ``+``."""
    whole = {word for word in problem.words if word and word != "grad:"}
    return whole.union(*(word.split("+") for word in whole if "+" in word))


_TREES = 4  # of a machine's own trials
_ALONE = 0.3  # standard deviation of a value of the base that rests on a single trial
_WORST = 1.3  # a supported candidate that a trial left out counts as the worst, or this many times slower than stock


def fit_own(op: Op, trials: Sequence[Trial], shipped: Forest | None) -> Forest | None:
    """Fit trees to a machine's own trials, as corrections of `shipped`; without usable trials return `shipped`."""
    import numpy as np
    from sklearn.ensemble import ExtraTreesRegressor

    trials = usable(op, trials)
    if not trials:
        return shipped
    base = shipped or Forest(["stock"], [])
    new = [name for name in candidates(op, trials) if name not in base.candidates]
    unseen = set().union(*(words(t.problem) for t in trials)).difference(base.words)
    forest = msgspec.structs.replace(base, candidates=[*base.candidates, *new], words=[*base.words, *sorted(unseen)])
    features = np.array(places(forest, trials))
    filled, known = table(op, trials, forest.candidates)
    rows = [forest.told(place) for place in features.tolist()]
    told = np.array([[row[n][0] if n in row else 0.0 for n in forest.candidates] for row in rows])
    timed = np.array([[name in t.timings for name in forest.candidates] for t in trials])
    rare = {c.name for c in op.candidates if c.compiles or c.accuracy == "approximate"}  # not always measured
    known &= timed | np.array([name not in rare for name in forest.candidates])
    residual = np.where(timed, filled - told, np.maximum(0.0, filled - told))
    residual = np.where(known, residual, 0.0)
    model = ExtraTreesRegressor(_TREES, min_samples_leaf=1, max_features=1.0, random_state=0, n_jobs=1)
    model.fit(features, np.clip(residual, -2.0, 2.0), sample_weight=weights(trials))
    kept = np.where(known, residual, np.nan)
    noise = np.array([[t.timings[n].noise if n in t.timings else 0.0 for n in forest.candidates] for t in trials])
    own = [tree(one.tree_, one.apply(features), kept, noise) for one in model.estimators_]
    counts = Counter(sorted(t.problem.dtype for t in trials))
    kinds = sorted({kind(t.problem) for t in trials})
    met = {name: limits([t for t in trials if kind(t.problem) == name]) for name in kinds}
    return msgspec.structs.replace(forest, own=own, of_own=len(forest.candidates), met=met, trials=dict(counts))


def usable(op: Op, trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials that compare registered candidates with stock."""
    there = set(op.names())
    return [t for t in trials if "stock" in t.usual and len(there & t.timings.keys()) > 1]


def candidates(op: Op, trials: Iterable[Trial]) -> list[str]:
    """Return the names of the measured and registered candidates, stock first."""
    found = {name for trial in trials for name in trial.timings} & set(op.names())
    return ["stock", *sorted(found - {"stock"})]


def places(forest: Forest, trials: Iterable[Trial]) -> list[list[float]]:
    """Return the trees' features of trials, one row each."""
    return [forest.place(t.problem, words(t.problem)) for t in trials]


def table(op: Op, trials: Sequence[Trial], names: Sequence[str]) -> tuple[Any, Any]:
    """Return log ratios (trials x candidates), missing ones filled in, and a mask: measured, or supported there."""
    import numpy as np

    ever = {name for trial in trials for name in trial.timings}.intersection(op.names())
    filled = np.empty((len(trials), len(names)))
    known = np.zeros(filled.shape, dtype=bool)
    for row, trial in enumerate(trials):
        worst = math.log(max(_WORST, *(timing.ratio for timing in trial.usual.values())))
        for column, name in enumerate(names):
            timing = trial.timings.get(name)
            filled[row, column] = min(worst, 1.2) if timing is None else math.log(timing.ratio)
            known[row, column] = timing is not None or (name in ever and op[name].unsupported(trial.problem) is None)
    return filled, known


def weights(trials: Iterable[Trial]) -> list[float]:
    """Return the weight of each trial, low where other programs disturbed it."""
    from statistics import median

    noise = (median(timing.noise for timing in trial.usual.values()) for trial in trials)
    return [1 / (1 + (one / 0.1) ** 2) for one in noise]


def limits(trials: Sequence[Trial]) -> Limits:
    """Return the range of sizes and the words of trials."""
    sizes = [[round(size, 3) for size in column] for column in zip(*(octaves(t.problem) for t in trials), strict=True)]
    seen = set().union(*(words(trial.problem) for trial in trials))
    return Limits([*map(min, sizes)], [*map(max, sizes)], sorted(seen))


def tree(fitted: Any, leaves: npt.NDArray[np.int64], values: Any, noise: Any = None) -> Tree:
    """Return a scikit-learn tree as a Tree whose leaves hold means of the finite values, and their noise or spread."""
    import numpy as np

    def packed(logs: Any) -> bytes:
        whole = np.where(np.isfinite(logs), np.round(np.nan_to_num(logs) / UNIT), UNKNOWN)
        return np.asarray(np.clip(whole, UNKNOWN, 32767).astype("<i2")).tobytes()

    ends = fitted.children_left < 0
    means, widths = [], []
    for node in np.flatnonzero(ends):
        inside = values[leaves == node]
        counts = np.isfinite(inside).sum(0)
        mean = np.where(counts > 0, np.nansum(inside, 0) / np.maximum(counts, 1), np.nan)
        width = np.sqrt(np.nansum((inside - mean) ** 2, 0) / np.maximum(counts - 1, 1))
        means.append(mean)
        widths.append(np.where(counts > 1, width, _ALONE) if noise is None else noise[leaves == node].mean(0))
    return Tree(
        feature=np.where(ends, -np.cumsum(ends), fitted.feature).tolist(),
        threshold=[round(value, 4) for value in np.where(ends, 0.0, fitted.threshold).tolist()],
        right=np.where(ends, 0, fitted.children_right).tolist(),
        values=packed(np.array(means)),
        spread=packed(np.array(widths)),
    )
