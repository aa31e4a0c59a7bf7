"""The installed releases, and whether their functions are known: equal to those of a release that passed the tests.

`known.json` has fingerprints of all that autokern hooks, replaces or relies on, for recorded releases and versions of
Python. A `Relied` compares its names with it when it is first asked, and again after an object was replaced.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import msgspec

from autokern.core.errors import AutokernWarning, suppressed, uninterrupted
from autokern.core.releases import LIBRARIES, comparison, installed
from autokern.core.releases.comparison import MAYBE, MISSING, PATCHED, Look, is_known
from autokern.core.releases.recorded import functions, is_of, original, table

_FEW = 6  # names that a warning lists
_left_out: dict[str, str] = {}
_made: dict[frozenset[Any], Relied] = {}
_warned = False


class Status(msgspec.Struct, frozen=True):
    """Whether autokern is on, and which functions it does not trust; prints as text.

    Parameters
    ----------
    enabled : bool
        Whether hooks are installed.
    versions : dict
        The version of each library, and whether it is tested.
    unknown : dict
        Library functions without the code of a tested release, with the reasons. Stock runs where autokern relies on
        one of them.
    why_off : str
        Why it is off, or what enables it; empty while it is enabled.
    """

    enabled: bool
    versions: dict[str, tuple[str, bool]]
    unknown: dict[str, str]
    why_off: str = ""

    def __str__(self) -> str:
        several = self.versions.items()
        versions = [f"{name} {text}{'' if tested else ' (not tested)'}" for name, (text, tested) in several]
        by_reason: dict[str, list[str]] = {}
        for name, why in sorted(self.unknown.items()):
            by_reason.setdefault(why, []).append(name.partition(":")[2] or name)
        off = [f"stock runs where autokern relies on code that {why}: {', '.join(of)}" for why, of in by_reason.items()]
        here = [f"autokern is {'on' if self.enabled else 'off'}: {', '.join(versions)}"]
        return "\n".join([*here, *filter(None, [self.why_off]), *off])

    __repr__ = __str__


def versions() -> dict[str, tuple[str, bool]]:
    """Return the versions of the libraries that are loaded, and whether each is recorded."""
    recorded = table()["releases"]
    found = {library: installed(library).partition("+")[0] for library in recorded if library in sys.modules}
    return {library: (version, version in recorded[library]) for library, version in found.items()}


def summary(names: dict[str, str]) -> str:
    """Return a message on unknown functions, the installed versions and the remedy; empty without any."""
    if not names:
        return ""
    found, named = versions(), sorted(names)
    texts = [
        f"{library} {version}" + ("" if tested else f" (tested: {', '.join(table()['releases'][library])})")
        for library, (version, tested) in sorted(found.items())
        if any(name.startswith((f"{library}.", f"{library}:")) for name in named)
    ]
    listed = ", ".join(name.partition(":")[2] or name for name in named[:_FEW])
    more = f" and {len(named) - _FEW} more" if len(named) > _FEW else ""
    return (
        f"{', '.join(texts) or 'the libraries'}: not the code of a tested release: {listed}{more}. Stock runs where "
        "autokern relies on these functions; `autokern doctor` lists all. Install a tested release, or set "
        "AUTOKERN_UNKNOWN=trust."
    )


def full_name(owner: Any, name: str) -> str:
    """Return the name by which `relied` finds an attribute of a module or class."""
    return f"{owner.__module__}:{owner.__qualname__}.{name}" if isinstance(owner, type) else f"{owner.__name__}:{name}"


def admits(owner: Any, name: str, found: Any, before: Any) -> bool:
    """Whether a hook may replace an attribute: it is unchanged and the library's own; else record why not."""
    module, _, qualified = full_name(owner, name).partition(":")
    if (library := module.partition(".")[0]) not in LIBRARIES | {"torch"}:
        return found is not None
    why = MISSING if found is None else PATCHED
    if found is not None and (comparison.trusted or found is before):
        home, defined = getattr(found, "__module__", None), getattr(found, "__name__", None)  # Python's own, imported
        standard = home in sys.stdlib_module_names and getattr(sys.modules.get(home), str(defined), None) is found
        theirs = standard or is_of(library, original(found)) or is_known(module, qualified, found)
        why = "" if theirs else why
    if why:
        leave_out(f"{module}:{qualified}", why)
    return not why


def leave_out(name: str, why: str) -> None:
    """Record that a hook is not installed, and why."""
    _left_out[name] = why


def trust(everything: bool) -> None:
    """Let all code count as known, or only recorded code, and forget all answers."""
    _left_out.clear()
    for one in _made.values() if everything is not comparison.trusted else ():
        one.answers = []
    comparison.begin(everything)


def unknown(every: bool = True) -> dict[str, str]:
    """Return the unknown names with reasons: of hooks that are left out and, if `every`, of all `Relied` objects."""
    found = _left_out.copy()
    for one in list(_made.values()) if every else ():
        found |= {} if one.holds() else one.unknown
    return found


def everything() -> dict[str, str]:
    """Import all recorded modules; return their unknown names with reasons, whether or not a call relies on them."""
    modules = [module for module in table()["code"] if find_spec(module.partition(".")[0]) is not None]
    for module in modules:
        with suppressed(Exception):  # the module is missing in this release
            import_module(module)
    space = {f"{module}:{name}": marks for module in modules for name, marks in table()["code"][module].items()}
    found = Look(name for name, marks in space.items() if MAYBE not in marks).unknown

    def compiled(name: str) -> bool:
        module, _, qualified = name.partition(":")
        return not any(functions(attrgetter(qualified)(sys.modules[module])))

    return unknown() | {name: why for name, why in found.items() if why == MISSING or not compiled(name)}


def warn(found: dict[str, str]) -> None:
    """Warn once, if a function is unknown for another reason than a replacement in this process."""
    global _warned
    if not _warned and any(why != PATCHED for why in found.values()):
        _warned = True
        warnings.warn(summary(found), AutokernWarning, stacklevel=4)


def relied(*names: Any) -> Relied:
    """Return the `Relied` of these names, the same object for the same names.

    A name is ``module:function``, ``module:Class.method``, ``module:Class`` (all recorded attributes), a class itself
    (with its recorded bases), or a pair of a name and the function to judge under it.
    """
    kinds = [name for name in names if isinstance(name, type)]
    bases = [base for kind in kinds for base in kind.__mro__ if comparison.members(base.__module__, base.__qualname__)]
    key = frozenset((*bases, *(name for name in names if not isinstance(name, type))))
    return _made.get(key) or _made.setdefault(key, Relied(key))


class Relied:
    """Library functions that a piece of autokern replaces or relies on; `relied` makes it."""

    def __init__(self, names: frozenset[Any]) -> None:
        self._names = names
        self.unknown: dict[str, str] = {}  # reasons by name, at the last comparison
        self._asked, self.answers = list[tuple[Any, Any]](), list[Any]()  # other than the first answers: compare again

    def holds(self) -> bool:
        """Whether all names are known at present; unchanged objects are not compared again."""
        try:
            same = bool(self.answers) and [ask(of) for ask, of in self._asked] == self.answers
        except uninterrupted(Exception):  # a name is missing, or objects do not compare
            same = False
        if not same:
            now = Look(self._names)
            self._asked, self.answers, self.unknown = now.asked, [ask(of) for ask, of in now.asked], now.unknown
            with suppressed(AutokernWarning):  # where warnings are errors, the call goes on
                warn(self.unknown)
        return not self.unknown
