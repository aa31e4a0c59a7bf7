"""Which releases are installed, which of them were tested, and the warning about unknown functions."""

from __future__ import annotations

import sys
import warnings

import msgspec

from autokern.core.errors import AutokernWarning, SettingsError
from autokern.core.releases.recorded import table
from autokern.core.settings import from_environment
from autokern.core.versions import installed

_FEW = 6
"""Names that a warning lists."""
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
        versions = [
            f"{name} {text}{'' if tested else ' (not tested)'}" for name, (text, tested) in self.versions.items()
        ]
        by_reason: dict[str, list[str]] = {}
        for name, why in sorted(self.unknown.items()):
            by_reason.setdefault(why, []).append(name.partition(":")[2] or name)
        off = [f"stock runs where it relies on code that {why}: {', '.join(of)}" for why, of in by_reason.items()]
        here = [f"autokern is {'on' if self.enabled else 'off'}: {', '.join(versions)}"]
        return "\n".join([*here, *filter(None, [self.why_off]), *off])


def why_off() -> str:
    """Return why autokern is off, or what enables it."""
    try:
        settings = from_environment()
    except SettingsError as error:
        return str(error)
    order = "AUTOKERN=0" if not settings.enabled else "AUTOKERN_UNKNOWN=stock" if settings.unknown == "stock" else ""
    return f"{order} keeps it off" if order else "`import autokern.auto` or autokern.enable() enables it"


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
    of = {library for library in found if any(name.startswith((f"{library}.", f"{library}:")) for name in named)}
    texts = []
    for library in sorted(of):
        version, recorded = found[library]
        tested = table()["releases"][library]
        texts.append(f"{library} {version} (tested: {', '.join(tested)})" if not recorded else f"{library} {version}")
    listed = ", ".join(name.partition(":")[2] or name for name in named[:_FEW])
    more = f" and {len(named) - _FEW} more" if len(named) > _FEW else ""
    return (
        f"{', '.join(texts) or 'the libraries'}: not the code of a tested release: {listed}{more}. Stock runs where "
        "autokern relies on it; `autokern doctor` lists all of it. Install a tested release, or set "
        "AUTOKERN_UNKNOWN=trust."
    )


def warn(names: dict[str, str]) -> None:
    """Warn once that functions are unknown."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(summary(names), AutokernWarning, stacklevel=5)
