"""Settings: the user's orders, given by ``AUTOKERN_*`` variables and by `using`.

Each field of `Settings` explains itself once, for the parser of the environment, `using`, the messages and
`docs/environment.md`. Parsers turn the text of a variable into a value, or raise ValueError with the expected form.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec

from autokern.core.errors import SettingsError, nearest

LEVELS_OF_ACCURACY = ("same", "approximate")  # candidates within the bound of their op, or lower precision as well

_NAME = re.compile(r"[a-z0-9][a-z0-9_.@\-]*")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

Pairs = tuple[tuple[str, str], ...]


def parse_bytes(text: str) -> int:
    """Return the number of bytes of a text such as ``8GiB``, ``512 MB`` or ``1048576``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError("expected a size such as 8GiB, 512MB or 1048576")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= size < math.inf:
        raise ValueError("the size must be positive and finite")
    return int(size)


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "on", "yes", "0", "false", "off", "no"):
        return text.lower() in ("1", "true", "on", "yes")
    raise ValueError("expected 0 or 1")


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _number(kind: type, is_valid: Callable[[Any], bool], expected: str, *words: str) -> Callable[[str], Any]:
    """Return a parser that accepts a valid number or one of these words."""

    def parse(text: str) -> Any:
        if text.lower() in words:
            return text.lower()
        try:
            found = kind(text)
        except ValueError:
            found = math.nan
        if not is_valid(found):
            raise ValueError(f"expected {expected}")
        return found

    return parse


def _one_of(*choices: str) -> Callable[[str], str]:
    return _number(float, lambda value: False, " or ".join(choices), *choices)


_seconds = _number(float, lambda value: 0 <= value < math.inf, "a number of seconds, 0 or more")
_relative_error = _number(float, lambda value: 0 < value < 1, "a relative error between 0 and 1, such as 1e-3")
_count = _number(int, lambda value: value >= 0, "a number of calls, 0 or more")
_threads = _number(int, lambda value: value >= 1, "auto, off or a number of threads, 1 or more", "auto", "off")
_seed = _number(int, lambda value: value >= 0, "random:SEED with a whole number")
_above = "auto, on, off or a number of seconds above 0"
_ranks = _number(float, lambda value: 0 < value < math.inf, _above, "auto", "on", "off")


def _name(text: str) -> str:
    if not _NAME.fullmatch(text.strip()):
        raise ValueError(f"{text!r} is no name of an op or candidate")
    return text.strip()


def _force(text: str) -> Pairs | int:
    """Return pairs of op and candidate, or the seed of ``random:SEED``."""
    if text.startswith("random:"):
        return int(_seed(text.removeprefix("random:")))
    if wrong := [item for item in text.split(",") if "=" not in item]:
        raise ValueError(f"expected op=candidate, found {wrong[0]!r}")
    pairs = [(_name(op), _name(candidate)) for op, _, candidate in (item.partition("=") for item in text.split(","))]
    if len({op for op, _ in pairs}) < len(pairs):
        raise ValueError("an op is named twice")
    return tuple(sorted(pairs))


def _exclude(text: str) -> frozenset[str]:
    parts = (item.partition("=") for item in text.split(",") if item.strip())
    return frozenset(f"{_name(op)}={_name(candidate)}" if equals else _name(op) for op, equals, candidate in parts)


class Row(NamedTuple):
    """Syntax and meaning of one setting."""

    parse: Callable[[str], Any]
    values: str  # for the docs
    meaning: str  # one sentence, for messages and docs
    field: str = ""

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return "AUTOKERN" if self.field == "enabled" else f"AUTOKERN_{self.field.upper()}"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The user's settings; the defaults fix no choice."""

    # fmt: off
    enabled: Annotated[bool, Row(_flag, "`1`, `0`",
        "0: stock code everywhere (default 1: autokern is on where the program, or `autokern everywhere on`, "
        "enables it)")] = True
    home: Annotated[Path | None, Row(_path, "folder",
        "where profiles are kept (default: the user's cache folder)")] = None
    profile: Annotated[Path | None, Row(_path, "file",
        "use this profile, also one of another machine; the file is never written, and nothing is measured")] = None
    calibrate: Annotated[str, Row(_one_of("worthwhile", "first-use", "never"), "`worthwhile`, `first-use`, `never`",
        "measure an op once its calls have taken so long that measuring pays back in the same run (default), at its "
        "first call, or only by `autokern calibrate`")] = "worthwhile"
    budget: Annotated[float, Row(_seconds, "seconds",
        "time limit of measurements in the course of one process (default 10); an op that cannot be measured in that "
        "time is left unmeasured for a day, or until `autokern calibrate`")] = 10.0
    force: Annotated[Pairs, Row(_force, "`qr=cpu,predict=stock` or `random:SEED`",
        "run this candidate; or, for each call, a random candidate of class same or better")] = ()
    random_seed: int | None = None  # of ``AUTOKERN_FORCE=random:SEED``
    exclude: Annotated[frozenset[str], Row(_exclude, "`keops,qr=choleskyqr2`",
        "candidates that must not run, by name or op=name")] = frozenset()
    unknown: Annotated[str, Row(_one_of("guard", "trust", "stock"), "`guard`, `trust`, `stock`",
        "where a library's function differs from all tested releases: stock runs where autokern relies on it "
        "(default), the function is trusted, or autokern stays off")] = "guard"
    accuracy: Annotated[str, Row(_one_of(*LEVELS_OF_ACCURACY), "`same`, `approximate`",
        "same (default): results agree with stock or are better; approximate: lower precision may run where its "
        "measured error is small enough")] = "same"
    max_error: Annotated[float, Row(_relative_error, "`1e-3`",
        "the largest error of lower precision, relative to the largest entry (default 1e-3)")] = 1e-3
    memory: Annotated[int | None, Row(parse_bytes, "`8GiB`",
        "memory limit of one call (default, and upper bound: the free memory)")] = None
    calls: Annotated[int | None, Row(_count, "a number",
        "expected calls of one size, over which compiling must repay itself (default: the calls so far)")] = None
    threads: Annotated[int | str, Row(_threads, "`auto`, a number, `off`",
        "limit of torch's threads: CPU quota and affinity (default), or a number, never above torch's own; off: "
        "thread counts are never changed")] = "auto"
    ranks: Annotated[float | str, Row(_ranks, "`auto`, `on`, `off`, seconds",
        "whether the ranks of one job share large products: under `autokern run`, while the program has no process "
        "group of its own (default); on: in any program that torchrun starts; off: never. Seconds: as auto, and the "
        "job ends when a rank has not answered for so long (default 300)")] = "auto"
    graphs: Annotated[str, Row(_one_of("off", "on"), "`off`, `on`",
        "on: small training steps on a GPU may be recorded as CUDA graphs where that is faster, while the process has "
        "one Python thread (default off: few whole programs have run with it)")] = "off"
    replay: Annotated[bool, Row(_flag, "`1`, `0`",
        "0: losses and acquisition functions that are evaluated again and again are never recorded and replayed "
        "(default 1)")] = True
    workers: Annotated[bool, Row(_flag, "`1`, `0`",
        "0: `autokern run` does not serve the processes that the program starts (default 1)")] = True
    deterministic: Annotated[bool, Row(_flag, "`0`, `1`",
        "1: nothing is measured, and earlier measurements are ignored; a pinned profile or an order decides, else "
        "stock runs")] = False
    strict: Annotated[bool, Row(_flag, "`0`, `1`",
        "1: faults of profiles, plugins and candidates raise an error; 0 (default): stock runs")] = False
    log: Annotated[str | None, Row(_one_of("debug", "info", "warning", "error"), "`debug`, `info`, `warning`, `error`",
        "show autokern's log from this level on, on standard error (default: as the program has set its "
        "logger)")] = None
    # fmt: on

    def forced(self, op: str) -> str | None:
        """Return the candidate that the user ordered for an op, or None."""
        return dict(self.force).get(op)


_HINTS = get_type_hints(Settings, include_extras=True).items()
ROWS = tuple(row._replace(field=name) for name, hint in _HINTS for row in getattr(hint, "__metadata__", ()))


def is_ours(variable: str) -> bool:
    """Whether an environment variable is addressed to autokern."""
    return variable == "AUTOKERN" or variable.startswith("AUTOKERN_")


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of the environment; SettingsError if a value is invalid, or a variable unknown."""
    given = {name: text.strip() for name, text in (os.environ if environ is None else environ).items() if is_ours(name)}
    parsed: dict[str, Any] = {}
    for row in ROWS if given else ():
        if text := given.pop(row.variable, ""):
            try:
                parsed |= _read(row, text)
            except (ValueError, RuntimeError) as error:  # `Path.expanduser` raises the latter
                raise SettingsError(f"{row.variable}={text!r}: {error}. {row.variable} means: {row.meaning}") from None
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
    """Return `base` with the arguments of one `using` block; None changes nothing, SettingsError if one is invalid."""
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
    """Return an argument of `using` as the text of a variable."""
    if isinstance(value, Mapping):
        return ",".join(f"{op.strip()}={candidate.strip()}" for op, candidate in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ",".join(item.strip() for item in value)
    return str(value)
