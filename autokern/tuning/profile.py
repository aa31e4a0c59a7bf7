"""Profile: raw timings of candidates on problems on one host, as plain JSON.

A profile keeps timings, never winners: policy may change without a new measurement. Merging two profiles of one
host keeps every trial of both. Thousands of objects without cycles (``gc=False``) cause no collection of garbage.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from typing import Annotated, Any

import msgspec

from autokern.core import shown
from autokern.core.errors import ProfileError
from autokern.core.problem import Problem
from autokern.core.tool import Tool
from autokern.tuning.forest import Forest

SCHEMA = 2
"""Profiles of schema 1 have no forests, which are fitted to their trials when they are read."""

DISTURBED = 0.1
"""Share of a timing in which threads waited for a core from which on it counts as disturbed."""
QUIET = 0.0
"""The share of one that does not: this object is the default, which files leave out."""
ENOUGH = 5
"""Trials of a group that make it known; fewer hint at times, but neither coefficients nor spread follow from them."""

_Positive = Annotated[float, msgspec.Meta(gt=1e-12, lt=1e9)]
_Amount = Annotated[float, msgspec.Meta(ge=0)]


class Timing(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """How long one candidate took on one problem.

    Parameters
    ----------
    seconds : float
        Median time of one call, in seconds.
    ratio : float
        Median of the paired ratios to the stock candidate (1 for stock itself).
    noise : float
        Standard error of log(ratio).
    rounds : int
        Number of pairs behind `ratio`.
    error : float
        Largest error found, in units of the op's bound.
    relative_error : float or None
        Of a candidate that approximates: largest error of an entry of the result, or of a gradient, relative to the
        largest entry, against float64 truth; None where it was not measured.
    disturbed : float
        Share of the time in which its threads, or those of the stock candidate beside it, waited for a core that other
        programs used; 0 where it was measured quietly, or where the system does not count it.
    """

    seconds: _Positive
    ratio: _Positive = 1.0
    noise: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] = 0.0
    rounds: Annotated[int, msgspec.Meta(ge=1)] = 1
    error: _Amount = 0.0
    relative_error: _Amount | None = None
    disturbed: Annotated[float, msgspec.Meta(ge=0, le=1)] = QUIET


class Trial(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One problem, and the timings of all candidates that were measured side by side on it.

    Unknown fields are ignored: earlier versions had one more.

    Parameters
    ----------
    problem : Problem
        The problem.
    timings : dict
        A Timing by name of candidate.
    """

    problem: Problem
    timings: dict[str, Timing]

    def updated(self, later: Trial) -> Trial:
        """Return this trial with the timings of a later one in place of its own, unless they were disturbed more."""
        timings = dict(self.timings)
        for name, timing in later.timings.items():
            if timing.disturbed <= timings.get(name, timing).disturbed:
                timings[name] = timing
        return Trial(self.problem, timings)

    @property
    def usual(self) -> dict[str, Timing]:
        """The timings of candidates within the op's bound: those that may be chosen by default."""
        return {name: timing for name, timing in self.timings.items() if timing.relative_error is None}

    @property
    def disturbed(self) -> bool:
        """Whether any of the timings was."""
        return any(timing.disturbed for timing in self.timings.values())


class Ban(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A candidate that gave wrong numbers or failed on this host, for one op, dtype and device kind."""

    op: str
    candidate: str
    dtype: str
    device: str
    reason: str


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Problems of `low` to `high` columns at which the exam found others faster: ``"shipped"`` or ``"stock"``."""

    op: str
    dtype: str
    device: str
    grad: str
    batched: bool
    low: int
    high: int
    instead: str

    def holds(self, problem: Problem) -> bool:
        """Whether a problem is one of those."""
        like = (*problem.group, problem.grad, problem.batch > 1)
        return (
            like == (self.op, self.dtype, self.device, self.grad, self.batched) and self.low <= problem.n <= self.high
        )


class Examined(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the exam of a calibration found of one thing that programs do.

    Parameters
    ----------
    task : str
        The thing.
    seconds : float
        Seconds by stock.
    shipped, new : float
        Times by the shipped choices and by those in force, over stock's.
    noise : float
        Standard error of the logs of the ratios.
    kept : str
        The choices that serve in place of the calibration's own, ``"shipped"`` or ``"stock"``; empty for its own.
    """

    task: str
    seconds: _Positive
    shipped: _Positive
    new: _Positive
    noise: _Amount = 0.0
    kept: str = ""


class Crossover(msgspec.Struct, frozen=True):
    """Up to `size` (the larger matrix dimension) `below` is the fastest as measured, from there on `above`."""

    size: float
    below: str
    above: str


def group_key(op: str, dtype: str, device: str) -> str:
    """Return the key of problems of an op, a dtype and a kind of device in a profile: ``"op/dtype@device"``."""
    return f"{op}/{dtype}@{device}"


def dated(ago: float = 0.0) -> str:
    """Return the UTC date so many seconds ago in ISO 8601, as profiles hold it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - ago))


class Profile(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The measurements of one host.

    Parameters
    ----------
    host : dict
        The measured host, as `Host.fields` gives it (no host name, user name or path).
    fingerprint : str
        Hash of the part of `host` that invalidates measurements.
    trials : list of Trial
        Raw timings.
    banned : list of Ban
        Candidates that must not run on this host.
    setup : dict
        Seconds that a candidate needs once per process before its first call, by ``"op.candidate"``.
    levels : dict
        The most thorough level at which each op was calibrated, by ``"op/dtype@device"``.
    tools : dict
        Results of trying tools that candidates need, by name (``"keops"``).
    fruitless : dict
        UTC date of a calibration without time for any problem of an op, or of one at first use that did not make it
        known, ISO 8601, by ``"op/dtype@device"``.
    forests : dict
        The trees that choose, fitted to the trials, by ``"op@device"``.
    kept : list of Kept
        Sizes at which other choices than theirs serve, by the exam.
    exam : list of Examined
        The results of the last exam.
    created : str
        UTC date of the last measurement, ISO 8601.
    """

    host: dict[str, Any] = msgspec.field(default_factory=dict)
    fingerprint: str = ""
    trials: Annotated[list[Trial], msgspec.Meta(max_length=50_000)] = msgspec.field(default_factory=list)
    banned: list[Ban] = msgspec.field(default_factory=list)
    setup: dict[str, _Amount] = msgspec.field(default_factory=dict)
    levels: dict[str, str] = msgspec.field(default_factory=dict)
    tools: dict[str, Tool] = msgspec.field(default_factory=dict)
    fruitless: dict[str, str] = msgspec.field(default_factory=dict)
    forests: dict[str, Forest] = msgspec.field(default_factory=dict)
    kept: list[Kept] = msgspec.field(default_factory=list)
    exam: list[Examined] = msgspec.field(default_factory=list)
    created: str = ""
    schema: int = SCHEMA

    def __repr__(self) -> str:
        if not self.trials:
            return "Profile(nothing measured)"
        ops, when = len({t.problem.op for t in self.trials}), self.created and f", last on {self.created[:10]}"
        return f"Profile({len(self.trials)} problems of {ops} ops{when}, host {self.fingerprint[:8] or 'unknown'})"

    def _repr_html_(self) -> str:
        return str(shown.portrait("html", self))

    def to_frame(self) -> Any:
        """Return a pandas data frame with a row for each problem and candidate; times in seconds.

        Raises
        ------
        AutokernError
            If pandas is not installed.
        """
        return shown.portrait("frame", self)

    def plot(self, op: str, device: str = "cpu", dtype: str = "float64", ax: Any = None) -> Any:
        """Draw the time of each candidate over the size, for the kind of problem of an op that has most sizes.

        Parameters
        ----------
        op, device, dtype : str
            Op, device kind and dtype.
        ax : matplotlib axes, optional
            Where to draw; by default new axes, which are returned.

        Raises
        ------
        AutokernError
            If nothing of the kind was measured, or matplotlib is not installed.
        """
        return shown.portrait("plot", self, op, device, dtype, ax)

    def merge(self, other: Profile) -> Profile:
        """Return a profile with the trials of both; for a problem in both, see `Trial.updated`.

        Of trees in both, those fitted to more trials stay: a program that began before a calibration saves old ones.
        """
        trials = {trial.problem: trial for trial in self.trials}
        for trial in other.trials:
            known = trials.get(trial.problem)
            trials[trial.problem] = known.updated(trial) if known else trial
        bans = {(b.op, b.candidate, b.dtype, b.device): b for b in (*self.banned, *other.banned)}
        full = {key: level for profile in (self, other) for key, level in profile.levels.items() if level == "full"}
        counts = Counter(group_key(*problem.group) for problem in trials)
        measured = {key for key, count in counts.items() if count >= ENOUGH} | {*self.levels, *other.levels}
        dates = self.fruitless | {k: max(date, self.fruitless.get(k, "")) for k, date in other.fruitless.items()}
        later = {k: f for k, f in other.forests.items() if k not in self.forests or f.count >= self.forests[k].count}
        older = other.forests.keys() - later.keys()
        kept = [k for k in self.kept if f"{k.op}@{k.device}" not in later]
        kept += [k for k in other.kept if f"{k.op}@{k.device}" not in older]
        return Profile(
            host=other.host or self.host,
            fingerprint=other.fingerprint or self.fingerprint,
            trials=list(trials.values()),
            banned=list(bans.values()),
            setup={**self.setup, **other.setup},
            levels={**self.levels, **other.levels, **full},
            tools={**self.tools, **other.tools},
            fruitless={key: date for key, date in dates.items() if key not in measured},
            forests={**self.forests, **later},
            kept=list(dict.fromkeys(kept)),  # without repetitions: files are merged with themselves
            exam=other.exam or self.exam,
            created=max(self.created, other.created),
        )

    def thresholds(self, op: str, device: str = "cpu", dtype: str = "float64") -> list[Crossover]:
        """Sizes at which the measured winner changes, for unbatched problems of the usual variant without gradients.

        Parameters
        ----------
        op : str
            Name of the Op.
        device, dtype : str
            Device kind and dtype; ``torch.float64`` and ``torch.device("cpu")`` are accepted too.

        Returns
        -------
        list of Crossover
            In order of size; empty where one candidate wins throughout or nothing was measured.
        """
        device, dtype = str(device).partition(":")[0], str(dtype).removeprefix("torch.")
        line = [t for t in self.trials if t.problem.group == (op, dtype, device)]
        line = [t for t in line if t.problem.batch == 1 and not t.problem.grad and "stock" in t.timings]
        variants = Counter(t.problem.variant for t in line)
        usual = max(variants, key=variants.__getitem__, default="")
        sizes: dict[int, list[Trial]] = {}
        for trial in line:
            if trial.problem.variant == usual:
                sizes.setdefault(max(trial.problem.m, trial.problem.n), []).append(trial)
        steps = [(size, _mean_log_ratios(trials)) for size, trials in sorted(sizes.items())]
        found = []
        below = _winner(steps[0][1]) if steps else "stock"
        for (size, ratios), (next_size, next_ratios) in itertools.pairwise(steps):
            above = _winner(next_ratios, holder=below)
            if below != above:
                found.append(Crossover(_crossing(size, next_size, ratios, next_ratios, below, above), below, above))
            below = above
        return found


def _mean_log_ratios(trials: list[Trial]) -> dict[str, float]:
    names = set.intersection(*(set(t.usual) for t in trials))
    return {name: sum(math.log(t.timings[name].ratio) for t in trials) / len(trials) for name in sorted(names)}


def _winner(ratios: dict[str, float], holder: str = "stock", tie: float = 0.05) -> str:
    """Return the fastest candidate; within a tie stock, or the `holder`, the fastest at the size below."""
    best = min(ratios, key=ratios.__getitem__, default="stock")
    for name in ("stock", holder):
        if ratios.get(name, math.inf) <= ratios.get(best, math.inf) + tie:
            return name
    return best


def _crossing(
    size: int, next_size: int, here: dict[str, float], there: dict[str, float], below: str, above: str
) -> float:
    """Interpolate in log(size) where the lead of `below` over `above` is lost."""
    gap, next_gap = here.get(above, 0.0) - here[below], there[above] - there.get(below, 0.0)
    share = gap / (gap - next_gap) if gap > 0 > next_gap else 0.5
    return math.exp(math.log(size) + share * (math.log(next_size) - math.log(size)))


def decode(data: bytes) -> Profile:
    """Return the profile that JSON text holds, with every value in range.

    Raises
    ------
    ProfileError
        If the text is not JSON, not of this schema, or holds a value that no measurement gives.
    """
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, MemoryError) as error:
        raise ProfileError(f"not a profile of schema {SCHEMA}: {error}") from None
    if not 1 <= profile.schema <= SCHEMA:
        raise ProfileError(f"profile has schema {profile.schema}; this autokern reads schema {SCHEMA}")
    if not all(forest.is_whole for forest in profile.forests.values()):
        raise ProfileError("profile holds trees whose nodes or leaves are missing")
    for p in (trial.problem for trial in profile.trials):
        if min(p.m, p.n, p.batch) < 1 or min(p.d, p.rhs) < 0 or max(p.m, p.n, p.d, p.rhs, p.batch) > 2**40:
            raise ProfileError(f"profile names an impossible size: {p}")
    if any(tool.seconds < 0 for tool in profile.tools.values()):
        raise ProfileError("profile holds an impossible time of trying a tool")
    return profile
