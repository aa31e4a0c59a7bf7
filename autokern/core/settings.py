"""Every ``AUTOKERN_*`` variable and every argument of `using`, parsed and validated here and nowhere else.

Reading never happens at import: `from_environment` is called when autokern is enabled, used or run as a program.
Floor 0: imports only `errors`.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from autokern.core.errors import AutokernWarning, SettingsError

__all__ = ["ORDERED_ACCURACIES", "VARIABLES", "Settings", "from_environment", "parse_bytes", "revised"]

VARIABLES = {
    "AUTOKERN": "0 turns autokern off: stock code everywhere (default 1)",
    "AUTOKERN_HOME": "folder for profiles (default: the user's cache folder)",
    "AUTOKERN_PROFILE": "file with a profile to use as it is; never written, nothing is measured",
    "AUTOKERN_CALIBRATE": "first-use (default): measure an op when first called; never: only `autokern calibrate`",
    "AUTOKERN_BUDGET": "seconds that first-use calibration may take in one process (default 10)",
    "AUTOKERN_FORCE": "op=candidate,... or random:SEED (any feasible candidate of class same or better)",
    "AUTOKERN_EXCLUDE": "candidates that must not run, by name or op=name, separated by commas",
    "AUTOKERN_THRESHOLD": "op:device=size,...: at or below that many columns run on the CPU, above on the device",
    "AUTOKERN_ACCURACY": "same (default): results agree with stock or are better; approximate: lower precision allowed",
    "AUTOKERN_MAX_ERROR": "largest relative error that what approximates may be measured to have (default 1e-3)",
    "AUTOKERN_MEMORY": "most memory that one call may take, e.g. 8GiB (default, and never more: what is free)",
    "AUTOKERN_CALLS": "calls of one size over which compiling must repay itself (default: as many as were seen so far)",
    "AUTOKERN_THREADS": "auto (default: at most what CPU quota and affinity allow), a number (at most that), or off",
    "AUTOKERN_GRAPHS": "off (default), or on: small training steps on a GPU may be recorded as CUDA graphs",
    "AUTOKERN_DETERMINISTIC": "1: nothing is measured; choices come from a pinned profile or an order, else stock",
    "AUTOKERN_STRICT": "1: cache trouble and candidate failures raise instead of falling back",
    "AUTOKERN_LOG": "debug, info, warning (default) or error",
}

_REMOVED = {
    "AUTOKERN_ALLOCATOR": "set glibc's MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ before the process starts",
}
"""Variables of earlier versions, and what to do in their place."""

ORDERED_ACCURACIES = ("same", "approximate")
"""What a user may allow: nothing but what keeps the bounds, or lower precision too."""

_Parser = Callable[[str], Mapping[str, object]]

_NAME = re.compile(r"[a-z0-9][a-z0-9_.@\-]*")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the user ordered; the defaults order nothing."""

    enabled: bool = True
    home: Path | None = None
    profile: Path | None = None
    calibrate: str = "first-use"
    budget: float = 10.0
    force: tuple[tuple[str, str], ...] = ()
    random_seed: int | None = None
    exclude: frozenset[str] = frozenset()
    threshold: tuple[tuple[str, str, int], ...] = ()
    accuracy: str = "same"
    max_error: float = 1e-3
    memory: int | None = None
    calls: int | None = None
    threads: int | str = "auto"
    graphs: str = "off"
    deterministic: bool = False
    strict: bool = False
    log: str = "warning"

    def forced(self, op: str) -> str | None:
        """Name of the candidate that the user ordered for an op."""
        return dict(self.force).get(op)

    def excludes(self, op: str, candidate: str) -> bool:
        """Whether the user forbade a candidate, for one op or for all."""
        return candidate in self.exclude or f"{op}={candidate}" in self.exclude

    def cpu_up_to(self, op: str, device: str) -> int | None:
        """Columns up to which the user ordered an op of this device kind to the CPU."""
        return {(o, d): size for o, d, size in self.threshold}.get((op, device))


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings that the environment gives; a variable that was removed is ignored, with a warning.

    Raises
    ------
    SettingsError
        If a variable has a value that cannot be obeyed, or an unknown ``AUTOKERN_*`` variable is set.
    """
    source = os.environ if environ is None else environ
    for name in _REMOVED.keys() & source.keys():
        message = f"{name} was removed from autokern and is ignored; unset it, and {_REMOVED[name]}"
        warnings.warn(message, AutokernWarning, stacklevel=1)  # of one place, so told once
    unknown = sorted(k for k in source if k.startswith("AUTOKERN") and k not in VARIABLES and k not in _REMOVED)
    if unknown:
        known = ", ".join(sorted(VARIABLES))
        raise SettingsError(f"unknown environment variable {unknown[0]}; autokern knows {known}")
    orders = {name: source[name].strip() for name in VARIABLES if source.get(name, "").strip()}
    parsed: dict[str, object] = {}
    for name, text in orders.items():
        try:
            parsed.update(_PARSERS[name](text))
        except ValueError as error:
            raise SettingsError(f"{name}={text!r}: {error}. {name} means: {VARIABLES[name]}") from None
    return Settings(**parsed)  # type: ignore[arg-type]


def revised(
    base: Settings,
    *,
    force: Mapping[str, str] | str | None = None,
    exclude: Iterable[str] | None = None,
    accuracy: str | None = None,
    max_error: float | None = None,
    memory: int | str | None = None,
    calls: int | None = None,
) -> Settings:
    """Return `base` with the orders of one `using` block laid over it.

    Raises
    ------
    SettingsError
        If an argument has a value that cannot be obeyed.
    """
    changes: dict[str, object] = {}
    try:
        if isinstance(force, str) and force.startswith("random:"):
            changes.update(_force(force), force=())
        elif force is not None:
            orders = dict(_pairs(force)) if isinstance(force, str) else force
            pairs = dict(base.force) | {_name(op): _name(candidate) for op, candidate in orders.items()}
            changes["force"] = tuple(sorted(pairs.items()))
        if exclude is not None:
            names = [exclude] if isinstance(exclude, str) else list(exclude)
            changes["exclude"] = base.exclude | _exclude(",".join(names))["exclude"]
        if accuracy is not None:
            changes.update(_accuracy(accuracy))
        if max_error is not None:
            changes.update(_max_error(str(max_error)))
        if memory is not None:
            changes["memory"] = parse_bytes(str(memory))
        if calls is not None:
            changes.update(_calls(str(calls)))
    except (ValueError, TypeError, AttributeError) as error:
        raise SettingsError(f"autokern.using: {error}") from None
    return msgspec.structs.replace(base, **changes)


def parse_bytes(text: str) -> int:
    """Return the number of bytes that a text such as ``8GiB``, ``512 MB`` or ``1048576`` names."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError("expected a size such as 8GiB, 512MB or 1048576")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= size < math.inf:
        raise ValueError("the size must be positive and finite")
    return int(size)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text.strip()):
        raise ValueError(f"{text!r} is no name of an op or candidate")
    return text.strip()


def _flag(field: str) -> _Parser:
    def parse(text: str) -> dict[str, object]:
        values = {
            "1": True,
            "true": True,
            "on": True,
            "yes": True,
            "0": False,
            "false": False,
            "off": False,
            "no": False,
        }
        if text.lower() not in values:
            raise ValueError("expected 0 or 1")
        return {field: values[text.lower()]}

    return parse


def _one_of(field: str, *choices: str) -> _Parser:
    def parse(text: str) -> dict[str, object]:
        if text.lower() not in choices:
            raise ValueError(f"expected {' or '.join(choices)}")
        return {field: text.lower()}

    return parse


def _accuracy(text: str) -> Mapping[str, object]:
    return _one_of("accuracy", *ORDERED_ACCURACIES)(text)


def _max_error(text: str) -> dict[str, object]:
    error = float(text)
    if not 0 < error < 1:
        raise ValueError(f"expected a relative error between 0 and 1, such as 1e-3, found {text}")
    return {"max_error": error}


def _path(field: str) -> _Parser:
    def parse(text: str) -> dict[str, object]:
        try:
            return {field: Path(text).expanduser()}
        except RuntimeError as error:
            raise ValueError(str(error)) from None

    return parse


def _calls(text: str) -> dict[str, object]:
    if not text.strip().isdecimal():
        raise ValueError("expected a number of calls, 0 or more")
    return {"calls": int(text)}


def _budget(text: str) -> dict[str, object]:
    budget = float(text)
    if not math.isfinite(budget) or budget < 0:
        raise ValueError("expected a number of seconds, 0 or more")
    return {"budget": budget}


def _force(text: str) -> dict[str, object]:
    if text.startswith("random:"):
        seed = text.removeprefix("random:")
        if not re.fullmatch(r"\d+", seed):
            raise ValueError("expected random:SEED with a whole number")
        return {"random_seed": int(seed)}
    return {"force": _pairs(text)}


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for item in text.split(","):
        op, equals, candidate = item.partition("=")
        if not equals:
            raise ValueError(f"expected op=candidate, found {item!r}")
        pairs.append((_name(op), _name(candidate)))
    if len({op for op, _ in pairs}) < len(pairs):
        raise ValueError("an op is named twice")
    return tuple(sorted(pairs))


def _exclude(text: str) -> dict[str, frozenset[str]]:
    names = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        op, equals, candidate = item.partition("=")
        names.add(f"{_name(op)}={_name(candidate)}" if equals else _name(op))
    return {"exclude": frozenset(names)}


def _threshold(text: str) -> dict[str, object]:
    found = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*([a-z0-9_]+):([a-z0-9]+)=(\d+)\s*", item)
        if not match:
            raise ValueError(f"expected op:device=size, found {item!r}")
        found.append((match[1], match[2], int(match[3])))
    return {"threshold": tuple(found)}


def _memory(text: str) -> dict[str, object]:
    return {"memory": parse_bytes(text)}


def _threads(text: str) -> dict[str, object]:
    if text.lower() in ("auto", "off"):
        return {"threads": text.lower()}
    if not re.fullmatch(r"[1-9]\d*", text):
        raise ValueError("expected auto, off or a number of threads, 1 or more")
    return {"threads": int(text)}


def _log(text: str) -> dict[str, object]:
    if text.lower() not in ("debug", "info", "warning", "error"):
        raise ValueError("expected debug, info, warning or error")
    return {"log": text.lower()}


_PARSERS: dict[str, _Parser] = {
    "AUTOKERN": _flag("enabled"),
    "AUTOKERN_HOME": _path("home"),
    "AUTOKERN_PROFILE": _path("profile"),
    "AUTOKERN_CALIBRATE": _one_of("calibrate", "first-use", "never"),
    "AUTOKERN_BUDGET": _budget,
    "AUTOKERN_FORCE": _force,
    "AUTOKERN_EXCLUDE": _exclude,
    "AUTOKERN_THRESHOLD": _threshold,
    "AUTOKERN_ACCURACY": _accuracy,
    "AUTOKERN_MAX_ERROR": _max_error,
    "AUTOKERN_MEMORY": _memory,
    "AUTOKERN_CALLS": _calls,
    "AUTOKERN_THREADS": _threads,
    "AUTOKERN_GRAPHS": _one_of("graphs", "off", "on"),
    "AUTOKERN_DETERMINISTIC": _flag("deterministic"),
    "AUTOKERN_STRICT": _flag("strict"),
    "AUTOKERN_LOG": _log,
}
