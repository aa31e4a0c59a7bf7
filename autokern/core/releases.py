"""Which releases are installed, which were tested, and what a program is told of functions that are not known."""

from __future__ import annotations

import warnings

from autokern.core.errors import AutokernWarning
from autokern.core.known import unknown, untested
from autokern.core.recorded import table
from autokern.core.versions import installed

__all__ = ["summary", "versions", "warn"]

_FEW = 6
"""Names that a warning lists."""
_warned = False


def versions() -> dict[str, tuple[str, bool]]:
    """Return the versions of the libraries, and whether each is recorded."""
    found = {library: installed(library).partition("+")[0] for library in table()["releases"]}
    return {
        library: (version, version in table()["releases"][library]) for library, version in found.items() if version
    }


def summary() -> str:
    """Return in one sentence which functions are unknown, of which versions, and what to do; or nothing."""
    names = unknown()
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


def warn(how: str) -> None:
    """Warn once of hooks that stay out, but for functions that the user replaced."""
    global _warned
    if not _warned and how != "trust" and untested():
        _warned = True
        warnings.warn(summary(), AutokernWarning, stacklevel=5)
