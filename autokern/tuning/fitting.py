"""Fitting: regression trees from trials, by scikit-learn, which is imported on first use.

A few extremely randomized trees (Geurts, Ernst and Wehenkel 2006) are fitted to a machine's own trials, as corrections
of the base tree that `calibration/ship.py` fits to other hosts' trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from autokern.core.op import Op
from autokern.core.problem import Problem
from autokern.tuning.forest import UNIT, UNKNOWN, Forest, Limits, Tree, kind, octaves, words
from autokern.tuning.policy import CONFIDENCE, NOISE
from autokern.tuning.profile import Trial

Array = npt.NDArray[np.float64]

_TREES = 4  # of a machine's own trials
_ALONE = 0.3  # standard deviation of a value of the base that rests on a single trial
HIGHEST = 2**19  # highest floor in elements: larger calls are dispatched, because their memory is checked
_WORST = 1.3  # a supported candidate that a trial left out counts as the worst, or this many times slower than stock


def fit_own(op: Op, trials: Sequence[Trial], shipped: Forest | None) -> Forest | None:
    """Fit trees to a machine's own trials, as corrections of `shipped`; without usable trials return `shipped`."""
    from sklearn.ensemble import ExtraTreesRegressor

    trials = usable(op, trials)
    if not trials:
        return shipped
    base = shipped or Forest(["stock"], [])
    new = [name for name in candidates(op, trials) if name not in base.candidates]
    unseen = set().union(*(words(t.problem) for t in trials)).difference(base.words)
    forest = msgspec.structs.replace(base, candidates=[*base.candidates, *new], words=[*base.words, *sorted(unseen)])
    features = places(forest, trials)
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
    dtypes, kinds = ([of(t.problem) for t in trials] for of in (lambda p: p.dtype, kind))
    counts = {dtype: dtypes.count(dtype) for dtype in sorted({*dtypes})}
    met = {name: limits([t for t in trials if kind(t.problem) == name]) for name in sorted({*kinds})}
    return msgspec.structs.replace(forest, own=own, of_own=len(forest.candidates), met=met, trials=counts)


def usable(op: Op, trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials that compare registered candidates with stock."""
    there = set(op.names())
    return [t for t in trials if "stock" in t.usual and len(there & t.timings.keys()) > 1]


def candidates(op: Op, trials: Iterable[Trial]) -> list[str]:
    """Return the names of the measured and registered candidates, stock first."""
    found = {name for trial in trials for name in trial.timings} & set(op.names())
    return ["stock", *sorted(found - {"stock"})]


def places(forest: Forest, trials: Iterable[Trial]) -> Array:
    """Return the trees' features of trials, one row each."""
    return np.array([forest.place(t.problem, words(t.problem)) for t in trials])


def table(op: Op, trials: Sequence[Trial], names: Sequence[str]) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Return log ratios (trials x candidates), missing ones filled in, and a mask: measured, or supported there."""
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


def weights(trials: Sequence[Trial]) -> Array:
    """Return the weight of each trial, low where other programs disturbed it."""
    noise = np.array([np.median([t.noise for t in trial.usual.values()]) for trial in trials])
    return np.asarray(1 / (1 + (noise / 0.1) ** 2))


def limits(trials: Sequence[Trial]) -> Limits:
    """Return the range of sizes and the words of trials."""
    sizes = np.array([octaves(trial.problem) for trial in trials]).round(3)
    seen = set().union(*(words(trial.problem) for trial in trials))
    return Limits(sizes.min(0).tolist(), sizes.max(0).tolist(), sorted(seen))


def tree(fitted: Any, leaves: npt.NDArray[np.int64], values: Array, noise: Array | None = None) -> Tree:
    """Return a scikit-learn tree as a Tree whose leaves hold means of the finite values, and their noise or spread."""
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
        values=_packed(np.array(means)),
        spread=_packed(np.array(widths)),
    )


def _packed(values: Array) -> bytes:
    """Return log ratios as 16-bit integers in units of `UNIT`."""
    whole = np.where(np.isfinite(values), np.round(np.nan_to_num(values) / UNIT), UNKNOWN)
    return np.asarray(np.clip(whole, UNKNOWN, 32767).astype("<i2")).tobytes()


def floor(op: Op, forest: Forest, device: str) -> int:
    """Return the number of elements below which the trees choose only stock, for every kind of problem.

    The problems of the op's grid are tried with both sides halved repeatedly. 0 for ops with a default other than
    stock.
    """
    if type(op).default_candidate is not Op.default_candidate:
        return 0
    grid = (p for dtype in ("float64", "float32") for p in op.grid("full", dtype, device))
    halved = {p.replace(m=p.m >> k, n=p.n >> k) for p in grid for k in range(min(p.m, p.n).bit_length())}
    won = (p.elements for p in sorted(halved, key=lambda p: p.elements) if _is_won(op, forest, p))
    return min(HIGHEST, next(won, 2 * HIGHEST) // 2)  # halved: problems in between are not tried


def _is_won(op: Op, forest: Forest, problem: Problem) -> bool:
    """Whether some candidate is predicted to be faster than stock by more than the uncertainty."""
    faster = {n for n, e in forest.estimates(problem).items() if e.log_ratio + CONFIDENCE * e.sigma <= -NOISE}
    return any(c.name in faster and c.unsupported(problem) is None for c in op.candidates)
