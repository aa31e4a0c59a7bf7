"""Profile: raw timings of candidates on problems on one host, as plain JSON; timings, never winners, as policy changes.

Thousands of objects without cycles (``gc=False``) cause no collection of garbage.
"""

from __future__ import annotations

import re
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec

from autokern.core.errors import ProfileError
from autokern.core.locks import once
from autokern.core.problem import Problem
from autokern.core.shown import Shown, shown
from autokern.tuning.forest import Forest

SCHEMA = 2
# At the beginning of a profile: its schema, then what autokern writes of the rest, a checksum and the bytes of trials.
_HEAD = re.compile(rb'\s*\{\s*"schema":\s*(\d{1,6})\b(?:,"tools":\{"checksum":(\d{1,10}),"trials":(\d{1,9})\},)?')
_TRIALS = b'"trials":'  # the last part of a profile
DISTURBED = 0.1  # share of a timing in which threads waited for a core from which on it counts as disturbed
QUIET = 0.0  # the share of one that does not: this object is the default, which files leave out
ENOUGH = 5  # trials of a group that make it known; fewer only hint

_Positive = Annotated[float, msgspec.Meta(gt=1e-12, lt=1e9)]
_Amount = Annotated[float, msgspec.Meta(ge=0)]


class Timing(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """How long one candidate took on one problem."""

    seconds: _Positive  # median of one call
    ratio: _Positive = 1.0  # median of the paired ratios to stock, 1 for stock itself
    noise: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] = 0.0  # standard error of log(ratio)
    rounds: Annotated[int, msgspec.Meta(ge=1)] = 1  # number of pairs behind the ratio
    error: _Amount = 0.0  # largest error found, in units of the op's bound
    relative_error: _Amount | None = None  # of a candidate that approximates, as `measuring.relative_error` has it
    # Share of the time in which its threads, or those of stock beside it, waited for a core; 0 where that is unknown.
    disturbed: Annotated[float, msgspec.Meta(ge=0, le=1)] = QUIET


class Trial(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """One problem, and the timings of all candidates that were measured side by side on it, by name."""

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
        mine = (self.op, self.dtype, self.device, self.grad, self.batched)
        return like == mine and self.low <= problem.n <= self.high


class Examined(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the exam of a calibration found of one thing that programs do."""

    task: str
    seconds: _Positive  # by stock
    shipped: _Positive  # time by the shipped choices over stock's
    new: _Positive  # the same by the choices in force
    noise: _Amount = 0.0  # standard error of the logs of the ratios
    kept: str = ""  # the choices that serve in place of the calibration's own: "shipped", "stock", or empty


def key_of(thing: Problem | Kept) -> str:
    """Return the key of the trees for a problem: ``"op@device"``."""
    return f"{thing.op}@{thing.device}"


def group_key(op: str, dtype: str, device: str) -> str:
    """Return the key of problems of an op, a dtype and a kind of device in a profile: ``"op/dtype@device"``."""
    return f"{op}/{dtype}@{device}"


def pools(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    """Return trials by ``"op@device"``."""
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(key_of(trial.problem), []).append(trial)
    return found


def dated(ago: float = 0.0) -> str:
    """Return the UTC date so many seconds ago in ISO 8601, as profiles hold it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - ago))


class Profile(Shown, msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The measurements of one host."""

    host: dict[str, Any] = {}  # as `Host.fields` gives it (no host name, user name or path)
    fingerprint: str = ""  # hash of the part of `host` that invalidates measurements
    trials: Annotated[list[Trial], msgspec.Meta(max_length=50_000)] = []
    banned: list[Ban] = []
    setup: dict[str, _Amount] = {}  # seconds that a candidate needs once in a process, by "op.candidate"
    levels: dict[str, str] = {}  # the most thorough level at which each op was calibrated, by "op/dtype@device"
    tools: dict[str, Any] = {}  # of a file, or of former versions; ignored
    # Date of a calibration without time for any problem of an op, or of one at first use that did not make it known.
    fruitless: dict[str, str] = {}
    forests: dict[str, Forest] = {}  # the trees that choose, fitted to the trials, by "op@device"
    kept: list[Kept] = []  # sizes at which other choices than theirs serve, by the exam
    exam: list[Examined] = []  # the results of the last one
    created: str = ""  # date of the last measurement; dates are UTC, ISO 8601
    schema: int = SCHEMA

    def __repr__(self) -> str:
        if not self.trials:
            return "Profile(nothing measured)"
        ops, when = len({t.problem.op for t in self.trials}), self.created and f", last on {self.created[:10]}"
        return f"Profile({len(self.trials)} problems of {ops} ops{when}, host {self.fingerprint[:8] or 'unknown'})"

    def plot(self, op: str, device: str = "cpu", dtype: str = "float64", ax: Any = None) -> Any:  # type: ignore[override]
        """Draw the time of each candidate over the size, for the kind of problem of an op that has most sizes.

        Return the matplotlib axes, by default new ones. AutokernError if nothing of the kind was measured, or
        matplotlib is not installed.
        """
        return shown("plot", self, ax, op, device, dtype)

    def merge(self, other: Profile) -> Profile:
        """Return a profile with the trials of both; for a problem in both, see `Trial.updated`.

        Of trees in both, those fitted to more trials stay: a program that began before a calibration saves old ones.
        """
        trials = {trial.problem: trial for trial in self.trials}
        for trial in other.trials:
            known = trials.get(trial.problem)
            trials[trial.problem] = known.updated(trial) if known else trial
        bans = {(b.op, b.candidate, b.dtype, b.device): b for b in (*self.banned, *other.banned)}
        levels = self.levels | other.levels | {k: full for k, full in self.levels.items() if full == "full"}
        counts = Counter(group_key(*t.problem.group) for t in trials.values() if len(t.timings) > 1)
        dates = self.fruitless | {k: max(date, self.fruitless.get(k, "")) for k, date in other.fruitless.items()}
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


class _Later(Sequence[Trial]):
    """Trials that are decoded when somebody asks for them: choosing needs the trees alone."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    @once
    def _found(self) -> list[Trial]:
        return msgspec.json.decode(self._text, type=list[Trial])

    def __getitem__(self, place: Any) -> Any:
        return self._found[place]

    def __len__(self) -> int:
        return len(self._found)

    def __eq__(self, other: object) -> bool:
        return self._found == other

    __hash__ = None  # type: ignore[assignment]


def encode(profile: Profile) -> bytes:
    """Return JSON that begins with its schema, proven to be readable: nothing else may replace what can be read."""
    fields = msgspec.structs.asdict(profile).items()
    told = {name: value for name, value in fields if value and name not in ("schema", "tools", "trials")}
    try:
        trials = msgspec.json.encode(list(profile.trials))
        rest = msgspec.json.encode(told)[1:-1]
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProfileError(f"the profile cannot be written as JSON: {error}") from error
    tail = b",".join(filter(None, [rest, _TRIALS + trials])) + b"}"
    _checked(b"{" + tail)
    head = SCHEMA, zlib.crc32(tail, len(trials)), len(trials)
    return b'{"schema":%d,"tools":{"checksum":%d,"trials":%d},' % head + tail


def decode(data: bytes) -> Profile:
    """Return the profile that JSON text holds, with every value in range; raises ProfileError for any other text.

    Where the checksum is right, autokern has proven that before it wrote the text.
    """
    head = _HEAD.match(data)
    schema = int(head[1]) if head else SCHEMA
    if schema > SCHEMA:
        raise NewerError(f"a newer autokern wrote it (schema {schema}, this one reads {SCHEMA}); upgrade autokern")
    if schema < SCHEMA:
        raise ProfileError(f"an earlier autokern wrote it (schema {schema}, this one reads {SCHEMA}); measure again")
    if head and head[2] and int(head[2]) == zlib.crc32(memoryview(data)[head.end() :], int(head[3])):
        start = len(data) - 1 - int(head[3])
        profile = _read(data[: start - len(_TRIALS)].rstrip(b",") + b"}")
        profile.trials = _Later(data[start:-1])  # type: ignore[assignment]
        return profile
    return _checked(data)


def _read(data: bytes) -> Profile:
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, MemoryError) as error:
        raise ProfileError(f"it is damaged, or no profile: {error}") from None
    profile.tools = {}
    return profile


def _checked(data: bytes) -> Profile:
    """Return the profile of a text that anybody may have written."""
    profile = _read(data)
    whole = profile.schema == SCHEMA and all(forest.is_whole for forest in profile.forests.values())
    sizes = [(p.m, p.n, p.batch, 1 + p.d, 1 + p.rhs) for p in (trial.problem for trial in profile.trials)]
    possible = all(min(of_problem) >= 1 and max(of_problem) <= 2**40 for of_problem in sizes)
    if not (whole and possible):
        raise ProfileError(f"it is of schema {profile.schema}, or it has broken trees or an impossible size")
    return profile
