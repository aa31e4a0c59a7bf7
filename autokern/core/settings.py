"""Settings: the user's orders, given by ``AUTOKERN_*`` variables and by `using`.

`ROWS` explains every setting once, for the parser of the environment, `using`, the messages and `docs/environment.md`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from autokern.core import parsers
from autokern.core.errors import AutokernWarning, SettingsError, nearest

LEVELS_OF_ACCURACY = ("same", "approximate")
"""Candidates within the bound of their op, or lower precision as well."""

_REMOVED = {
    "AUTOKERN_ALLOCATOR": "set glibc's MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ before the process starts",
    "AUTOKERN_RECORD": "use nothing in its place: first use measures the problems at hand",
    "AUTOKERN_LEARN": "set nothing in its place: choices come from calibrations only",
}
"""Variables of earlier versions, and their replacements."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The user's orders, as `ROWS` explains them; the defaults order nothing."""

    enabled: bool = True
    home: Path | None = None
    profile: Path | None = None
    calibrate: str = "worthwhile"
    budget: float = 10.0
    force: parsers.Pairs = ()
    random_seed: int | None = None  # of ``AUTOKERN_FORCE=random:SEED``
    exclude: frozenset[str] = frozenset()
    unknown: str = "guard"
    threshold: tuple[tuple[str, str, int], ...] = ()
    accuracy: str = "same"
    max_error: float = 1e-3
    memory: int | None = None
    calls: int | None = None
    threads: int | str = "auto"
    ranks: float | str = "auto"
    graphs: str = "off"
    replay: bool = True
    workers: bool = True
    deterministic: bool = False
    strict: bool = False
    log: str | None = None

    @property
    def order_choices(self) -> bool:
        """Whether a setting affects which candidates run, so that even the smallest calls must be dispatched."""
        named = self.force or self.exclude or self.threshold or self.random_seed is not None
        limits = (self.memory, self.calls) != (None, None)
        return bool(named or limits or self.accuracy != "same" or self.calibrate == "first-use")

    def forced(self, op: str) -> str | None:
        """Return the candidate that the user ordered for an op, or None."""
        return dict(self.force).get(op)

    def excludes(self, op: str, candidate: str) -> bool:
        """Whether the user excluded a candidate, for one op or for all."""
        return candidate in self.exclude or f"{op}={candidate}" in self.exclude

    def cpu_up_to(self, op: str, device: str) -> int | None:
        """Return the largest number of columns for which the user ordered a device's op to the CPU, or None."""
        return {(o, d): size for o, d, size in self.threshold}.get((op, device))


class Row(NamedTuple):
    """Syntax and meaning of one setting."""

    field: str
    parse: Callable[[str], Any]  # raises ValueError
    values: str  # for the docs
    meaning: str  # one sentence, for messages and docs

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return "AUTOKERN" if self.field == "enabled" else f"AUTOKERN_{self.field.upper()}"


ROWS = (
    Row(
        "enabled", parsers.flag, "`1`, `0`",
        "0: stock code everywhere (default 1: as the program says; it enables nothing by itself, which `autokern "
        "everywhere on` does)",
    ),
    Row("home", parsers.path, "folder", "where profiles are kept (default: the user's cache folder)"),
    Row(
        "profile", parsers.path, "file",
        "use this profile as it is, whatever machine it is of; it is never written, and nothing is measured",
    ),
    Row(
        "calibrate", parsers.one_of("worthwhile", "first-use", "never"), "`worthwhile`, `first-use`, `never`",
        "measure an op once its calls have taken so long that measuring pays back in the same run (default), at its "
        "first call, or only by `autokern calibrate`",
    ),
    Row(
        "budget", parsers.seconds, "seconds",
        "time limit of measurements in the course of one process (default 10); an op that cannot be measured in that "
        "time is left unmeasured for a day, or until `autokern calibrate`",
    ),
    Row(
        "force", parsers.force, "`qr=cpu,predict=stock` or `random:SEED`",
        "run this candidate; or, for each call, a random candidate of class same or better",
    ),
    Row(
        "exclude", parsers.exclude, "`compiled,qr=choleskyqr2`",
        "candidates that must not run, by name or op=name",
    ),
    Row(
        "unknown", parsers.one_of("guard", "trust", "stock"), "`guard`, `trust`, `stock`",
        "where a library's function is not that of a tested release: leave out what relies on it (default), use it all "
        "the same, or enable nothing at all",
    ),
    Row(
        "threshold", parsers.threshold, "`qr:cuda=512`",
        "up to that many columns the op runs on the CPU, above on the device",
    ),
    Row(
        "accuracy", parsers.one_of(*LEVELS_OF_ACCURACY), "`same`, `approximate`",
        "same (default): results agree with stock or are better; approximate: lower precision may run where its "
        "measured error is small enough",
    ),
    Row(
        "max_error", parsers.relative_error, "`1e-3`",
        "the largest error of lower precision, relative to the largest entry (default 1e-3)",
    ),
    Row(
        "memory", parsers.parse_bytes, "`8GiB`",
        "memory limit of one call (default, and upper bound: the free memory)",
    ),
    Row(
        "calls", parsers.count, "a number",
        "expected calls of one size, over which compiling must repay itself (default: the calls so far)",
    ),
    Row(
        "threads", parsers.threads, "`auto`, a number, `off`",
        "limit of torch's threads: CPU quota and affinity (default), or a number, never above torch's own; off: thread "
        "counts are never changed",
    ),
    Row(
        "ranks", parsers.ranks, "`auto`, `on`, `off`, seconds",
        "whether the ranks of one job share large products: under `autokern run`, while the program has no process "
        "group of its own (default); on: in any program that torchrun starts; off: never. Seconds: as auto, and the "
        "job ends when a rank has not answered for so long (default 300)",
    ),
    Row(
        "graphs", parsers.one_of("off", "on"), "`off`, `on`",
        "on: small training steps on a GPU may be recorded as CUDA graphs where that is faster, while the process has "
        "one Python thread (default off: proven on one GPU only)",
    ),
    Row(
        "replay", parsers.flag, "`1`, `0`",
        "0: what optimisers and training loops evaluate again and again is never recorded and replayed (default 1)",
    ),
    Row(
        "workers", parsers.flag, "`1`, `0`",
        "0: `autokern run` does not serve the processes that the program starts (default 1)",
    ),
    Row(
        "deterministic", parsers.flag, "`0`, `1`",
        "1: nothing is measured, and what was measured before is left aside; a pinned profile or an order decides, "
        "else stock runs",
    ),
    Row("strict", parsers.flag, "`0`, `1`", "1: faults of the cache and of candidates raise; else stock runs"),
    Row(
        "log", parsers.one_of("debug", "info", "warning", "error"), "`debug`, `info`, `warning`, `error`",
        "show on standard error what autokern logs from this level on (default: as the program has set its logger)",
    ),
)  # fmt: skip


def is_ours(variable: str) -> bool:
    """Whether an environment variable is addressed to autokern."""
    return variable == "AUTOKERN" or variable.startswith("AUTOKERN_")


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of the environment; removed variables are ignored with a warning.

    SettingsError if a value is invalid, or a variable ``AUTOKERN_*`` unknown.
    """
    source = os.environ if environ is None else environ
    given = {name: text.strip() for name, text in source.items() if is_ours(name)}
    for name in _REMOVED.keys() & given.keys():
        message = f"{name} was removed from autokern and is ignored; unset it, and {_REMOVED[name]}"
        warnings.warn(message, AutokernWarning, stacklevel=1)  # level 1: shown once
        del given[name]
    parsed: dict[str, Any] = {}
    for row in ROWS if given else ():
        if text := given.pop(row.variable, ""):
            try:
                parsed |= _read(row, text)
            except ValueError as error:
                message = f"{row.variable}={text!r}: {error}. {row.variable} means: {row.meaning}"
                raise SettingsError(message) from None
    if given:
        known = ", ".join(sorted(row.variable for row in ROWS))
        question = nearest(min(given), [row.variable for row in ROWS])
        raise SettingsError(f"unknown environment variable {min(given)}; autokern knows {known}{question}")
    return Settings(**parsed)


def _read(row: Row, text: str) -> dict[str, Any]:
    """Return the fields that a text sets; ``random:SEED`` also clears `force`."""
    value = row.parse(text)
    seeded = row.field == "force" and isinstance(value, int)
    return {"random_seed": value, "force": ()} if seeded else {row.field: value}


def revised(base: Settings, **orders: Any) -> Settings:
    """Return `base` with the arguments of one `using` block; None changes nothing.

    SettingsError if an argument has an invalid value.
    """
    changes: dict[str, Any] = {}
    for row in ROWS:
        value = orders.get(row.field)
        try:
            if value is not None and value != {}:
                changes |= _read(row, _written(value))
        except (ValueError, TypeError, AttributeError) as error:
            raise SettingsError(f"autokern.using: {error}") from None
    if changes.get("force"):
        changes["force"] = tuple(sorted((dict(base.force) | dict(changes["force"])).items()))
    if "exclude" in changes:
        changes["exclude"] |= base.exclude
    return msgspec.structs.replace(base, **changes)


def _written(value: Any) -> str:
    """Return an argument of `using` in the form of a variable."""
    if isinstance(value, Mapping):
        return ",".join(f"{op.strip()}={candidate.strip()}" for op, candidate in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ",".join(item.strip() for item in value)
    return str(value)
