"""Profiles in files: private and written atomically; a faulty file costs speed, but no call fails by it.

There is one JSON file for each host fingerprint. Writers take turns: each merges its measurements into the file's and
replaces it; an unreadable file is set aside. Faults are reported once, or raised under `settings.strict`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from autokern.core.errors import AutokernWarning, ProfileError, suppressed, uninterrupted
from autokern.core.settings import Settings
from autokern.system.files import FLAGS, Folder, contents, write_whole
from autokern.tuning.profile import NewerError, Profile, decode, encode

_log = logging.getLogger("autokern")
_reported: set[str] = set()  # faults already reported in this process; the only state here

_STALE = 3600.0  # a temporary file older than this many seconds is abandoned
_PATIENCE = 10.0  # seconds to wait for other writers, each of which takes about as long as an fsync

_OURS = re.compile(r"[0-9a-f]{8,64}(\.json|\.bad|\.[0-9a-f]{16}\.tmp|(\.[a-z0-9_]+)?\.lock)")

# Faults of the file itself. Others (EMFILE, ESTALE, EIO, ...) may be transient, and must not set a good profile aside.
_FOREIGN = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EISDIR)


def home(settings: Settings) -> Path | None:
    """Return the folder for profiles, which may not exist yet, or None if this user has none."""
    try:
        import platformdirs

        path = settings.home or platformdirs.user_cache_path("autokern")
        found = settings.home is not None or path.is_absolute()  # else a literal `~` that could not be expanded
        return path.absolute() if found and "~" not in path.parts else None
    except uninterrupted(Exception):  # without HOME and passwd entry, or in a working directory that was removed
        return None


def leaves_aside(settings: Settings) -> bool:
    """Whether this machine's measurements must not decide: deterministic, and no profile is pinned."""
    return settings.deterministic and settings.profile is None


def in_force(settings: Settings, fingerprint: str) -> Profile | None:
    """Return the pinned profile of any host, or the stored profile of this host, or None."""
    if settings.profile is None:
        return load(settings, fingerprint)
    try:
        return read_file(settings.profile)
    except ProfileError as error:
        _tell(settings, f"{error}. No profile is used.", error, f"pinned: {error}")
        return None


def origin(settings: Settings, fingerprint: str) -> str:
    """Return a text that names the file in force."""
    if settings.profile is not None:
        return f"pinned by AUTOKERN_PROFILE:\n{settings.profile}"
    path = home(settings)
    return f"kept in\n{path if path is None else path / f'{fingerprint}.json'}"


def load(settings: Settings, fingerprint: str) -> Profile | None:
    """Return the stored profile of a host, or None if it is missing or cannot be trusted."""
    try:
        with opened_home(settings) as folder:
            return _kept(folder, fingerprint)
    except FileNotFoundError:
        return None
    except uninterrupted(OSError, ProfileError) as error:
        message = f"asked for the profile of host {fingerprint} in {home(settings)}; found: {error}. "
        message += "It is not used; measuring again replaces it, unless a newer autokern wrote it."
        level = logging.WARNING if isinstance(error, ProfileError) else logging.INFO
        _tell(settings, message, error, f"load {fingerprint}: {error}", level)  # the next save warns
        return None


def save(settings: Settings, profile: Profile) -> Path | None:
    """Merge a profile into the stored one of its host; return the file, or None if it is unchanged by an error."""
    try:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(opened_home(settings, create=True))
            name, lock = _named(f"{profile.fingerprint}.json"), f"{profile.fingerprint}.lock"
            with suppressed(OSError):  # without locks, one of two concurrent writers may lose its measurements
                stack.enter_context(folder.locked(lock, _PATIENCE))
            folder.write(name, encode(_added(folder, profile)))
            return folder.path / name
    except uninterrupted(OSError, ProfileError) as error:
        message = f"asked to keep measurements in {home(settings) or 'the cache folder'}; found: {error}. "
        message += "They serve this process only; set AUTOKERN_HOME to a private folder that can be written."
        _tell(settings, message, error, "save")
        return None


def read_file(path: Path) -> Profile:
    """Return the profile in a file that the user named."""
    try:
        return decode(contents(os.open(path, os.O_RDONLY | FLAGS), path, private=False))
    except uninterrupted(OSError, ProfileError) as error:
        advice = "Name one file, a copy of what `autokern profile export FILE` or `calibrate --output FILE` wrote"
        raise ProfileError(f"asked for the profile in {path}; found: {error}. {advice}") from error


def write_file(path: Path, profile: Profile) -> None:
    """Write a profile atomically to a file that the user names."""
    write_whole(path, encode(profile))


def clear(settings: Settings) -> list[Path]:
    """Remove all of autokern's files in the folder, recognised by name, and return the removed ones."""
    try:
        with opened_home(settings) as folder:
            return [folder.path / name for name in folder.names() if _OURS.fullmatch(name) and folder.remove(name)]
    except FileNotFoundError:
        return []
    except uninterrupted(OSError, ProfileError) as error:
        raise ProfileError(f"asked to clear {home(settings)}; found: {error}. Remove it by hand") from error


@contextlib.contextmanager
def calibrating(settings: Settings, fingerprint: str, op: str) -> Iterator[bool]:
    """Yield whether this block may calibrate an op: no other process or thread is doing so, or there are no locks."""
    with contextlib.ExitStack() as stack:
        granted = True
        with suppressed(OSError, ProfileError):
            folder = stack.enter_context(opened_home(settings, create=True))
            granted = stack.enter_context(folder.locked(_named(f"{fingerprint}.{op}.lock")))
        yield granted


def _tell(settings: Settings, message: str, error: Exception, key: str, level: int | None = None) -> None:
    """Raise ProfileError under `settings.strict`; else warn once or, with a level, log once."""
    if settings.strict:
        raise ProfileError(message) from error
    if key not in _reported and level is None:
        warnings.warn(message, AutokernWarning, stacklevel=3)
    elif key not in _reported:
        _log.log(level or 0, "%s", message)
    _reported.add(key)


def _named(name: str) -> str:
    if not _OURS.fullmatch(name):
        raise ProfileError(f"{name!r} is no name of a file that autokern keeps: fingerprints are hexadecimal")
    return name


def opened_home(settings: Settings, *, create: bool = False) -> Folder:
    """Return the open folder for profiles, a context; OSError or ProfileError if there is none to trust."""
    if (path := home(settings)) is None:
        raise FileNotFoundError("this user has no cache folder")
    return Folder(path, private=True, create=create)


def _kept(folder: Folder, fingerprint: str) -> Profile:
    name = _named(f"{fingerprint}.json")
    profile = decode(contents(folder.open(name, os.O_RDONLY), name, private=True))
    if profile.fingerprint != fingerprint:
        raise ProfileError("it was measured on another host")
    return profile


def _added(folder: Folder, profile: Profile) -> Profile:
    """Return the stored and the given profile merged; set a bad file aside, and remove stale temporary files."""
    with suppressed(OSError):
        for name in folder.names():
            if name.endswith(".tmp") and _OURS.fullmatch(name) and folder.modified(name) < time.time() - _STALE:
                folder.remove(name)
    try:
        return _kept(folder, profile.fingerprint).merge(profile)
    except FileNotFoundError:
        return profile
    except NewerError:  # the newer autokern still reads the file
        raise
    except uninterrupted(OSError, ProfileError) as error:
        if isinstance(error, OSError) and error.errno not in _FOREIGN:
            raise
        if (key := f"load {profile.fingerprint}: {error}") not in _reported:
            _log.warning("set the profile of host %s in %s aside: %s", profile.fingerprint, folder.path, error)
        _reported.add(key)
        folder.replace(f"{profile.fingerprint}.json", f"{profile.fingerprint}.bad")
        return profile
