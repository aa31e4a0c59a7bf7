"""Settings: the user's orders, given by ``AUTOKERN_*`` variables and by `using`.

Each setting is one row: a field of `Settings` with its type, default, variable, parser and meaning. The rows define the
parser of the environment, the arguments of `using`, the messages and `docs/environment.md`.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec

from autokern.core import parsers
from autokern.core.errors import AutokernWarning, SettingsError

__all__ = ["LEVELS_OF_ACCURACY", "Row", "Settings", "from_environment", "revised", "rows", "table"]

LEVELS_OF_ACCURACY = ("same", "approximate")
"""Candidates within the bound of their op, or lower precision too."""

_REMOVED = {
    "AUTOKERN_ALLOCATOR": "set glibc's MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ before the process starts",
    "AUTOKERN_RECORD": "use nothing in its place: first use measures the problems at hand",
    "AUTOKERN_LEARN": "set nothing in its place: choices come from calibrations only",
}
"""Variables of earlier versions, and their replacements."""


class Row(NamedTuple):
    """A setting, apart from its type and default."""

    variable: str  # of the environment
    values: str  # for the docs
    meaning: str  # one sentence, for messages and docs
    parse: Callable[[str], Any]  # raises ValueError
    combine: Callable[[Any, Any], Any] | None = None  # for the value of `using`, with that outside


def _replaced(_: Any, new: Any) -> Any:
    return new


def _merged(old: parsers.Pairs, new: parsers.Pairs) -> parsers.Pairs:
    return tuple(sorted((dict(old) | dict(new)).items()))


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The user's orders; the defaults order nothing."""

    enabled: Annotated[bool, Row("AUTOKERN", "`1`, `0`", "0: stock code everywhere (default 1)", parsers.flag)] = True
    home: Annotated[
        Path | None,
        Row("AUTOKERN_HOME", "folder", "where profiles are kept (default: the user's cache folder)", parsers.path),
    ] = None
    profile: Annotated[
        Path | None,
        Row(
            "AUTOKERN_PROFILE",
            "file",
            "use this profile as it is, whatever machine it is of; it is never written, and nothing is measured",
            parsers.one_path,
        ),
    ] = None
    calibrate: Annotated[
        str,
        Row(
            "AUTOKERN_CALIBRATE",
            "`worthwhile`, `first-use`, `never`",
            "measure an op once its calls have taken so long that measuring pays back in the same run (default), at "
            "its first call, or only by `autokern calibrate`",
            parsers.one_of("worthwhile", "first-use", "never"),
        ),
    ] = "worthwhile"
    budget: Annotated[
        float,
        Row(
            "AUTOKERN_BUDGET",
            "seconds",
            "time limit of measurements in the course of one process (default 10); an op that cannot be measured in "
            "that time is left unmeasured for a day, or until `autokern calibrate`",
            parsers.seconds,
        ),
    ] = 10.0
    force: Annotated[
        parsers.Pairs,
        Row(
            "AUTOKERN_FORCE",
            "`qr=cpu,matmul=stock` or `random:SEED`",
            "run this candidate; or, for each call, a random candidate of class same or better",
            parsers.force,
            _merged,
        ),
    ] = ()
    random_seed: int | None = None
    """The seed of ``AUTOKERN_FORCE=random:SEED``."""
    exclude: Annotated[
        frozenset[str],
        Row(
            "AUTOKERN_EXCLUDE",
            "`compiled,qr=choleskyqr2`",
            "candidates that must not run, by name or op=name",
            parsers.exclude,
            frozenset.union,
        ),
    ] = frozenset()
    unknown: Annotated[
        str,
        Row(
            "AUTOKERN_UNKNOWN",
            "`guard`, `trust`, `stock`",
            "where a library's function is not that of a tested release: leave out what relies on it (default), use "
            "it all the same, or enable nothing at all",
            parsers.one_of("guard", "trust", "stock"),
        ),
    ] = "guard"
    threshold: Annotated[
        tuple[tuple[str, str, int], ...],
        Row(
            "AUTOKERN_THRESHOLD",
            "`qr:cuda=512`",
            "up to that many columns the op runs on the CPU, above on the device",
            parsers.threshold,
        ),
    ] = ()
    accuracy: Annotated[
        str,
        Row(
            "AUTOKERN_ACCURACY",
            "`same`, `approximate`",
            "same (default): results agree with stock or are better; approximate: lower precision may run where its "
            "measured error is small enough",
            parsers.one_of(*LEVELS_OF_ACCURACY),
            _replaced,
        ),
    ] = "same"
    max_error: Annotated[
        float,
        Row(
            "AUTOKERN_MAX_ERROR",
            "`1e-3`",
            "the largest error of lower precision, relative to the largest entry (default 1e-3)",
            parsers.relative_error,
            _replaced,
        ),
    ] = 1e-3
    memory: Annotated[
        int | None,
        Row(
            "AUTOKERN_MEMORY",
            "`8GiB`",
            "memory limit of one call (default, and upper bound: the free memory)",
            parsers.parse_bytes,
            _replaced,
        ),
    ] = None
    calls: Annotated[
        int | None,
        Row(
            "AUTOKERN_CALLS",
            "a number",
            "expected calls of one size, over which compiling must repay itself (default: the calls so far)",
            parsers.count,
            _replaced,
        ),
    ] = None
    threads: Annotated[
        int | str,
        Row(
            "AUTOKERN_THREADS",
            "`auto`, a number, `off`",
            "limit of torch's threads: CPU quota and affinity (default), or a number, never above torch's own; off: "
            "thread counts are never changed",
            parsers.threads,
        ),
    ] = "auto"
    ranks: Annotated[
        float | str,
        Row(
            "AUTOKERN_RANKS",
            "`auto`, `on`, `off`, seconds",
            "whether the ranks of one job share large products: under `autokern run`, while the program has no process "
            "group of its own (default); on: in any program that torchrun starts; off: never. Seconds: "
            "as auto, and the job ends when a rank has not answered for so long (default 300)",
            parsers.ranks,
        ),
    ] = "auto"
    graphs: Annotated[
        str,
        Row(
            "AUTOKERN_GRAPHS",
            "`off`, `on`",
            "on: small training steps on a GPU may be recorded as CUDA graphs where that is faster, while the process "
            "has one Python thread (default off: not yet proven on a GPU)",
            parsers.one_of("off", "on"),
        ),
    ] = "off"
    workers: Annotated[
        bool,
        Row(
            "AUTOKERN_WORKERS",
            "`1`, `0`",
            "0: `autokern run` does not serve the processes that the program starts (default 1)",
            parsers.flag,
        ),
    ] = True
    deterministic: Annotated[
        bool,
        Row(
            "AUTOKERN_DETERMINISTIC",
            "`0`, `1`",
            "1: nothing is measured, and what was measured before is left aside; a pinned profile or an order "
            "decides, else stock runs",
            parsers.flag,
        ),
    ] = False
    strict: Annotated[
        bool,
        Row(
            "AUTOKERN_STRICT",
            "`0`, `1`",
            "1: faults of the cache and of candidates raise; else stock runs",
            parsers.flag,
        ),
    ] = False
    log: Annotated[
        str | None,
        Row(
            "AUTOKERN_LOG",
            "`debug`, `info`, `warning`, `error`",
            "show on standard error what autokern logs from this level on (default: as the program has set its logger)",
            parsers.one_of("debug", "info", "warning", "error"),
        ),
    ] = None

    def forced(self, op: str) -> str | None:
        """Return the candidate that the user ordered for an op, or None."""
        return dict(self.force).get(op)

    def excludes(self, op: str, candidate: str) -> bool:
        """Whether the user excluded a candidate, for one op or for all."""
        return candidate in self.exclude or f"{op}={candidate}" in self.exclude

    def cpu_up_to(self, op: str, device: str) -> int | None:
        """Return the number of columns up to which the user ordered an op of a device kind to the CPU, or None."""
        return {(o, d): size for o, d, size in self.threshold}.get((op, device))


@functools.cache
def rows() -> dict[str, Row]:
    """Return the row of each field that has a variable."""
    hints = get_type_hints(Settings, include_extras=True)
    return {name: row for name, hint in hints.items() for row in getattr(hint, "__metadata__", ())}


def table() -> str:
    """Return all variables as a Markdown table, as in `docs/environment.md`."""
    lines = [f"| `{row.variable}` | {row.values} | {row.meaning} |" for row in rows().values()]
    return "\n".join(["| variable | values | meaning |", "|---|---|---|", *lines])


def _fields(field: str, value: Any) -> dict[str, Any]:
    """Return the changed fields of a parsed value: a seed replaces orders by name."""
    return {"random_seed": value, "force": ()} if field == "force" and isinstance(value, int) else {field: value}


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of the environment; removed variables are ignored with a warning.

    SettingsError if a value is invalid, or a variable ``AUTOKERN_*`` unknown.
    """
    source = os.environ if environ is None else environ
    given = {name: text.strip() for name, text in source.items() if name.startswith("AUTOKERN")}
    for name in _REMOVED.keys() & given.keys():
        message = f"{name} was removed from autokern and is ignored; unset it, and {_REMOVED[name]}"
        warnings.warn(message, AutokernWarning, stacklevel=1)  # level 1: shown once
        del given[name]
    parsed: dict[str, Any] = {}
    for field, row in rows().items() if given else ():
        if text := given.pop(row.variable, ""):
            try:
                parsed.update(_fields(field, row.parse(text)))
            except ValueError as error:
                message = f"{row.variable}={text!r}: {error}. {row.variable} means: {row.meaning}"
                raise SettingsError(message) from None
    if given:
        known = ", ".join(sorted(row.variable for row in rows().values()))
        raise SettingsError(f"unknown environment variable {min(given)}; autokern knows {known}")
    return Settings(**parsed)


def _written(value: Any) -> str:
    """Return an argument of `using` in the form of a variable."""
    if isinstance(value, Mapping):
        return ",".join(f"{op.strip()}={candidate.strip()}" for op, candidate in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ",".join(item.strip() for item in value)
    return str(value)


def revised(base: Settings, **orders: Any) -> Settings:
    """Return `base` combined with the orders of one `using` block; None orders nothing.

    SettingsError if an argument has an invalid value.
    """
    changes: dict[str, Any] = {}
    for field, value in orders.items():
        row = rows()[field]
        assert row.combine is not None, field
        if value is None:
            continue
        try:
            parsed = row.parse(_written(value)) if value or not isinstance(value, Mapping) else ()
            changes.update(_fields(field, parsed))
            if "random_seed" not in changes or field != "force":
                changes[field] = row.combine(getattr(base, field), parsed)
        except (ValueError, TypeError, AttributeError) as error:
            raise SettingsError(f"autokern.using: {error}") from None
    return msgspec.structs.replace(base, **changes)
