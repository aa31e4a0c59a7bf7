"""Profile: timings of candidates on problems on one host, as JSON without winners, because the policy changes."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from autokern.core.errors import ProfileError
from autokern.core.output import Shown
from autokern.core.problem import Problem
from autokern.system.files import LARGEST
from autokern.tuning.forest import Forest

SCHEMA = 2
_HEAD = re.compile(rb'\s*\{\s*"schema":\s*(\d{1,6})\b')  # the beginning of a file
DISTURBED = 0.1  # a timing counts as disturbed if its threads waited for a core for a larger share of it
QUIET = 0.0  # the share of an undisturbed timing; files leave out this very object, the default
ENOUGH = 5  # trials from which on a group counts as measured

_Positive = Annotated[float, msgspec.Meta(gt=1e-12, lt=1e9)]
_Amount = Annotated[float, msgspec.Meta(ge=0)]


class Timing(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """Time of one candidate on one problem."""

    seconds: _Positive  # median of one call
    ratio: _Positive = 1.0  # median of the paired ratios to stock, 1 for stock itself
    noise: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] = 0.0  # standard error of log(ratio)
    rounds: Annotated[int, msgspec.Meta(ge=1)] = 1  # number of pairs behind the ratio
    error: _Amount = 0.0  # largest error found, in units of the op's bound
    relative_error: _Amount | None = None  # of an approximate candidate, by `measuring.relative_error`
    # Share of the time for which its threads, or stock's in the same round, waited for a core; 0 if unknown.
    disturbed: Annotated[float, msgspec.Meta(ge=0, le=1)] = QUIET


class Trial(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """One problem, and the timings of the candidates that were measured side by side on it, by name."""

    problem: Problem
    timings: dict[str, Timing]

    def updated(self, later: Trial) -> Trial:
        """Return this trial updated by a later one's timings, except more disturbed ones."""
        mine, others = self.timings, later.timings.items()
        better = {name: timing for name, timing in others if timing.disturbed <= mine.get(name, timing).disturbed}
        return Trial(self.problem, mine | better)

    @property
    def usual(self) -> dict[str, Timing]:
        """The timings of candidates within the op's bound, which may be chosen by default."""
        return {name: timing for name, timing in self.timings.items() if timing.relative_error is None}

    @property
    def disturbed(self) -> bool:
        """Whether other programs disturbed any of the timings."""
        return any(timing.disturbed for timing in self.timings.values())


class Ban(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A candidate that gave wrong numbers or failed on this host, for one op, dtype and device kind."""

    op: str
    candidate: str
    dtype: str
    device: str
    reason: str


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Problems of `low` to `high` columns at which the exam found the ``"shipped"`` choices or ``"stock"`` faster."""

    op: str
    dtype: str
    device: str
    grad: str
    batched: bool
    low: int
    high: int
    instead: str

    def holds(self, problem: Problem) -> bool:
        """Whether this choice holds for a problem."""
        like = (*problem.group, problem.grad, problem.batch > 1)
        mine = (self.op, self.dtype, self.device, self.grad, self.batched)
        return like == mine and self.low <= problem.n <= self.high


class Examined(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of a calibration's exam on one typical task of programs."""

    task: str
    seconds: _Positive  # by stock
    shipped: _Positive  # time by the shipped choices over stock's
    new: _Positive  # time by the choices in force over stock's
    noise: _Amount = 0.0  # standard error of the logs of the ratios
    kept: str = ""  # the choices kept in place of the calibration's own: "shipped", "stock", or empty


def key_of(thing: Problem | Kept) -> str:
    """Return the key of the trees for a problem: ``"op@device"``."""
    return f"{thing.op}@{thing.device}"


def group_key(op: str, dtype: str, device: str) -> str:
    """Return the key of a group of problems in a profile: ``"op/dtype@device"``."""
    return f"{op}/{dtype}@{device}"


def pools(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    """Group trials by ``"op@device"``."""
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(key_of(trial.problem), []).append(trial)
    return found


def dated(ago: float = 0.0) -> str:
    """Return the UTC time so many seconds ago in ISO 8601, the format of dates in profiles."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - ago))


class Profile(Shown, msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The measurements of one host."""

    host: dict[str, Any] = {}  # `Host.fields` (no host name, user name or path)
    fingerprint: str = ""  # `Host.fingerprint`: measurements are valid only for a host with the same one
    trials: Annotated[list[Trial], msgspec.Meta(max_length=50_000)] = []
    banned: list[Ban] = []
    setup: dict[str, _Amount] = {}  # seconds of a candidate's first call in a process (compilation), by "op.candidate"
    levels: dict[str, str] = {}  # the most thorough level at which each group was calibrated, by "op/dtype@device"
    tools: dict[str, Any] = {}  # written by former versions; ignored
    fruitless: dict[str, str] = {}  # dates of the last calibration that measured too little, by "op/dtype@device"
    forests: dict[str, Forest] = {}  # trees fitted to the trials, which predict times, by "op@device"
    kept: list[Kept] = []  # sizes at which the exam found the shipped choices or stock faster
    exam: list[Examined] = []  # results of the last exam
    created: str = ""  # date of the last measurement; dates are UTC, ISO 8601
    schema: int = SCHEMA

    def __repr__(self) -> str:
        if not self.trials:
            return "Profile(nothing measured)"
        ops, when = len({t.problem.op for t in self.trials}), self.created and f", last on {self.created[:10]}"
        return f"Profile({len(self.trials)} problems of {ops} ops{when}, host {self.fingerprint[:8] or 'unknown'})"

    def merge(self, other: Profile) -> Profile:
        """Return a profile with the trials of both; `Trial.updated` joins those of the same problem."""
        trials = {trial.problem: trial for trial in self.trials}
        for trial in other.trials:
            known = trials.get(trial.problem)
            trials[trial.problem] = known.updated(trial) if known else trial
        bans = {(b.op, b.candidate, b.dtype, b.device): b for b in (*self.banned, *other.banned)}
        levels = self.levels | other.levels | {k: full for k, full in self.levels.items() if full == "full"}
        counts = Counter(group_key(*t.problem.group) for t in trials.values() if len(t.timings) > 1)
        dates = self.fruitless | {k: max(date, self.fruitless.get(k, "")) for k, date in other.fruitless.items()}
        # trees fitted to more trials stay: a program that began before a calibration may save old trees after it
        mine = {key: sum(forest.trials.values()) for key, forest in self.forests.items()}
        later = {key: f for key, f in other.forests.items() if sum(f.trials.values()) >= mine.get(key, 0)}
        kept = [k for k in self.kept if key_of(k) not in later]
        kept += [k for k in other.kept if key_of(k) in later or key_of(k) not in other.forests]
        return Profile(
            host=other.host or self.host,
            fingerprint=other.fingerprint or self.fingerprint,
            trials=list(trials.values()),
            banned=list(bans.values()),
            setup=self.setup | other.setup,
            levels=levels,
            fruitless={key: date for key, date in dates.items() if key not in levels and counts[key] < ENOUGH},
            forests=self.forests | later,
            kept=list(dict.fromkeys(kept)),  # without repetitions: files are merged with themselves
            exam=other.exam or self.exam,
            created=max(self.created, other.created),
        )


class NewerError(ProfileError):
    """A newer autokern wrote the file; this one must not change it."""


def encode(profile: Profile) -> bytes:
    """Return JSON that begins with its schema; it is read once, so that no unreadable file replaces a good one."""
    fields = msgspec.structs.asdict(profile).items()
    told = {name: value for name, value in fields if value and name not in ("schema", "tools")}
    try:
        data = msgspec.json.encode({"schema": SCHEMA, **told})
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProfileError(f"the profile cannot be written as JSON: {error}") from error
    if len(data) > LARGEST:
        raise ProfileError(f"the profile is larger than {LARGEST} bytes")
    decode(data)
    return data


def decode(data: bytes) -> Profile:
    """Return the profile in a text; ProfileError if a value is out of range."""
    head = _HEAD.match(data)
    schema = int(head[1]) if head else SCHEMA
    if schema > SCHEMA:
        raise NewerError(f"a newer autokern wrote it (schema {schema}, this one reads {SCHEMA}); upgrade autokern")
    if schema < SCHEMA:
        raise ProfileError(f"an earlier autokern wrote it (schema {schema}, this one reads {SCHEMA}); measure again")
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, MemoryError) as error:
        raise ProfileError(f"it is damaged, or no profile: {error}") from None
    profile.tools = {}
    whole = profile.schema == SCHEMA and all(forest.is_whole for forest in profile.forests.values())
    sizes = [(p.m, p.n, p.batch, 1 + p.d, 1 + p.rhs) for p in (trial.problem for trial in profile.trials)]
    possible = all(min(of_problem) >= 1 and max(of_problem) <= 2**40 for of_problem in sizes)
    if not (whole and possible):
        raise ProfileError(f"it is of schema {profile.schema}, or it has broken trees or an impossible size")
    return profile
