"""Settings: what the user orders by ``AUTOKERN_*`` variables and by `using`.

Each setting is one row: the field of `Settings` with its type, its default, its variable, its parser and its meaning.
The parser of the environment, `using`, the messages and `docs/environment.md` are made from these rows.
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
"""Only candidates that keep the bound of their op, or lower precision too."""

_REMOVED = {
    "AUTOKERN_ALLOCATOR": "set glibc's MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ before the process starts",
}
"""Variables of earlier versions, and what to do in their place."""


class Row(NamedTuple):
    """What belongs to a setting beside its type and default.

    Parameters
    ----------
    variable : str
        Environment variable.
    values : str
        What may be written, for the docs.
    meaning : str
        One sentence, for messages and docs.
    parse : callable
        Maps the text to the value; raises ValueError.
    combine : callable, optional
        Lays the value of a `using` block over the one outside of it; without it, `using` has no such argument.
    """

    variable: str
    values: str
    meaning: str
    parse: Callable[[str], Any]
    combine: Callable[[Any, Any], Any] | None = None


def _replaced(_: Any, new: Any) -> Any:
    return new


def _merged(old: parsers.Pairs, new: parsers.Pairs) -> parsers.Pairs:
    return tuple(sorted((dict(old) | dict(new)).items()))


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the user ordered; the defaults order nothing."""

    enabled: Annotated[
        bool,
        Row("AUTOKERN", "`1`, `0`", "0: stock code everywhere (default 1)", parsers.flag),
    ] = True
    home: Annotated[
        Path | None,
        Row("AUTOKERN_HOME", "folder", "where profiles are kept (default: the user's cache folder)", parsers.path),
    ] = None
    profile: Annotated[
        Path | None,
        Row(
            "AUTOKERN_PROFILE",
            "file",
            "use this profile as it is; it is never written, and nothing is measured",
            parsers.path,
        ),
    ] = None
    calibrate: Annotated[
        str,
        Row(
            "AUTOKERN_CALIBRATE",
            "`first-use`, `never`",
            "measure an op at its first call (default), or only when told to by `autokern calibrate`",
            parsers.one_of("first-use", "never"),
        ),
    ] = "first-use"
    budget: Annotated[
        float,
        Row(
            "AUTOKERN_BUDGET",
            "seconds",
            "what first-use calibration may take in one process (default 10); an op for which that is too short is "
            "left alone for a day, or until `autokern calibrate`",
            parsers.seconds,
        ),
    ] = 10.0
    force: Annotated[
        parsers.Pairs,
        Row(
            "AUTOKERN_FORCE",
            "`qr=cpu,matmul=stock` or `random:SEED`",
            "run this candidate; or one drawn at random for each call among those of class same or better",
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
    threshold: Annotated[
        tuple[tuple[str, str, int], ...],
        Row(
            "AUTOKERN_THRESHOLD",
            "`qr:cuda=512`",
            "at or below that many columns the op runs on the CPU, above on the device",
            parsers.threshold,
        ),
    ] = ()
    accuracy: Annotated[
        str,
        Row(
            "AUTOKERN_ACCURACY",
            "`same`, `approximate`",
            "same (default): results agree with stock or are better; approximate: lower precision is allowed where "
            "its error was measured and is small enough",
            parsers.one_of(*LEVELS_OF_ACCURACY),
            _replaced,
        ),
    ] = "same"
    max_error: Annotated[
        float,
        Row(
            "AUTOKERN_MAX_ERROR",
            "`1e-3`",
            "the largest error of what approximates, relative to the largest entry (default 1e-3)",
            parsers.relative_error,
            _replaced,
        ),
    ] = 1e-3
    memory: Annotated[
        int | None,
        Row(
            "AUTOKERN_MEMORY",
            "`8GiB`",
            "most memory that one call may take (default, and never more: what is free)",
            parsers.parse_bytes,
            _replaced,
        ),
    ] = None
    calls: Annotated[
        int | None,
        Row(
            "AUTOKERN_CALLS",
            "a number",
            "calls of one size over which compiling must repay itself (default: as many as were seen so far)",
            parsers.count,
            _replaced,
        ),
    ] = None
    threads: Annotated[
        int | str,
        Row(
            "AUTOKERN_THREADS",
            "`auto`, a number, `off`",
            "most threads that torch gets: what CPU quota and affinity allow (default), or the number, never more "
            "than it has; off: thread counts are never touched",
            parsers.threads,
        ),
    ] = "auto"
    graphs: Annotated[
        str,
        Row(
            "AUTOKERN_GRAPHS",
            "`off`, `on`",
            "on: small training steps on a GPU may be recorded as CUDA graphs where that repays itself, while the "
            "process has one Python thread (default off: it has not been proven on a GPU yet)",
            parsers.one_of("off", "on"),
        ),
    ] = "off"
    deterministic: Annotated[
        bool,
        Row(
            "AUTOKERN_DETERMINISTIC",
            "`0`, `1`",
            "1: nothing is measured; choices come from a pinned profile or an order, else stock",
            parsers.flag,
        ),
    ] = False
    strict: Annotated[
        bool,
        Row(
            "AUTOKERN_STRICT",
            "`0`, `1`",
            "1: cache trouble and candidate failures raise instead of falling back",
            parsers.flag,
        ),
    ] = False
    log: Annotated[
        str,
        Row(
            "AUTOKERN_LOG",
            "`debug`, `info`, `warning`, `error`",
            "level of the logger `autokern` (default warning)",
            parsers.one_of("debug", "info", "warning", "error"),
        ),
    ] = "warning"

    def forced(self, op: str) -> str | None:
        """Name of the candidate that the user ordered for an op."""
        return dict(self.force).get(op)

    def excludes(self, op: str, candidate: str) -> bool:
        """Whether the user forbade a candidate, for one op or for all."""
        return candidate in self.exclude or f"{op}={candidate}" in self.exclude

    def cpu_up_to(self, op: str, device: str) -> int | None:
        """Columns up to which the user ordered an op of this device kind to the CPU."""
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
    """Return what a parsed value changes: a seed takes the place of orders by name."""
    return {"random_seed": value, "force": ()} if field == "force" and isinstance(value, int) else {field: value}


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings that the environment gives; a variable that was removed is ignored, with a warning.

    Raises
    ------
    SettingsError
        If a variable has a value that cannot be obeyed, or an unknown ``AUTOKERN_*`` variable is set.
    """
    source = os.environ if environ is None else environ
    given = {name: text.strip() for name, text in source.items() if name.startswith("AUTOKERN")}
    for name in _REMOVED.keys() & given.keys():
        message = f"{name} was removed from autokern and is ignored; unset it, and {_REMOVED[name]}"
        warnings.warn(message, AutokernWarning, stacklevel=1)  # of one place, so told once
        del given[name]
    parsed: dict[str, Any] = {}
    for field, row in rows().items() if given else ():
        if text := given.pop(row.variable, ""):
            try:
                parsed.update(_fields(field, row.parse(text)))
            except ValueError as error:
                told = f"{row.variable}={text!r}: {error}. {row.variable} means: {row.meaning}"
                raise SettingsError(told) from None
    if given:
        known = ", ".join(sorted(row.variable for row in rows().values()))
        raise SettingsError(f"unknown environment variable {min(given)}; autokern knows {known}")
    return Settings(**parsed)


def _written(value: Any) -> str:
    """Return an argument of `using` as it would stand in a variable."""
    if isinstance(value, Mapping):
        return ",".join(f"{op.strip()}={candidate.strip()}" for op, candidate in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ",".join(item.strip() for item in value)
    return str(value)


def revised(base: Settings, **orders: Any) -> Settings:
    """Return `base` with the orders of one `using` block laid over it; None orders nothing.

    Raises
    ------
    SettingsError
        If an argument has a value that cannot be obeyed.
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
