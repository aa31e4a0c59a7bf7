"""Profiles in files: private, checked, atomic; a faulty file costs speed and never a call.

One file per host fingerprint: a header with a checksum, then the profile as JSON. Writers add keys and remove none.
Correctness rests on rename; locks only save work. A file that ``AUTOKERN_PROFILE`` pins is only read.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import re
import secrets
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import msgspec

from autokern.core.errors import AutokernWarning, ProfileError
from autokern.core.recovery import recoverable
from autokern.core.settings import Settings
from autokern.system.files import FLAGS, LARGEST, Folder, Version, contents, opened, write_whole
from autokern.tuning.checksum import NewerError, body_of, sealed, unsealed
from autokern.tuning.profile import SCHEMA, Profile, decode

_log = logging.getLogger("autokern")
_reported: set[str] = set()  # warnings and log lines of this process; the only state here

_MOST_QUARANTINED = 5
_STALE = 3600.0  # seconds after which no process can still be writing a temporary file
_TRIES = 64  # in every round of racing writers one succeeds: enough for so many without a lock
_PATIENCE = 0.25  # seconds to hope for the writers' lock, which is held about as long as an fsync takes

_OURS = re.compile(r"[0-9a-f]{8,64}(\.json|\.[0-9a-f]{16}\.(tmp|bad)|(\.[a-z0-9_]+)?\.lock)")

# Faults of the file itself. Others (EMFILE, ESTALE, EIO, ...) may pass and must not cost a good profile its name.
_FOREIGN = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EISDIR)


def home(settings: Settings) -> Path | None:
    """Return the folder for profiles, which may not exist yet, or None where there is no place for one."""
    path = settings.home
    if path is None:
        try:
            import platformdirs

            path = platformdirs.user_cache_path("autokern")
        except Exception as error:  # without HOME and passwd entry: any error of the platform's own look-up
            if not recoverable(error):
                raise
            return None
        if not path.is_absolute():  # a literal `~` that could not be expanded
            return None
    try:
        return None if "~" in path.parts else path.absolute()
    except OSError:  # a relative path in a working directory that is gone
        return None


def leaves_aside(settings: Settings) -> bool:
    """Whether what is kept on this machine must not decide, since a later calibration may change it."""
    return settings.deterministic and settings.profile is None


def in_force(settings: Settings, fingerprint: str) -> Profile | None:
    """Return the pinned profile, whatever host it is of, or the profile kept for a host, or None.

    Raises
    ------
    ProfileError
        If the pinned profile cannot be read or is none; of the home folder only if `settings.strict` is set.
    """
    return load(settings, fingerprint) if settings.profile is None else read_file(settings.profile)


def origin(settings: Settings, fingerprint: str) -> str:
    """Return in lines which file is in force."""
    if settings.profile is not None:
        return f"pinned by AUTOKERN_PROFILE:\n{settings.profile}"
    path = home(settings)
    return f"kept in\n{path if path is None else path / f'{fingerprint}.json'}"


def load(settings: Settings, fingerprint: str) -> Profile | None:
    """Return the profile kept for a host, or None; a file that cannot be trusted is put aside and counts as none.

    Raises
    ------
    ProfileError
        If there is a profile that cannot be trusted, and `settings.strict` is set.
    """
    try:
        with _opened_home(settings) as folder:
            return _kept(folder, fingerprint)[0]
    except FileNotFoundError:
        return None
    except (OSError, ProfileError) as error:
        message = f"asked for the profile of host {fingerprint} in {home(settings)}; found: {error}. "
        message += "It is not used; measuring again replaces it, unless a newer autokern wrote it."
        if settings.strict:
            raise ProfileError(message) from error
        if _first(f"load {fingerprint}: {error}"):  # a warning of the folder comes when something is to be saved
            _log.log(logging.WARNING if isinstance(error, ProfileError) else logging.INFO, "%s", message)
        return None


def save(settings: Settings, profile: Profile) -> Path | None:
    """Add a profile to that kept for its host; return the file, or None where it could not be written.

    Keys are only ever added, also beside other writers; after an error the file is as before. Of a key in both, the
    given profile's value stays.

    Raises
    ------
    ProfileError
        If the profile could not be written, and `settings.strict` is set.
    """
    try:
        with _opened_home(settings, create=True) as folder:
            _sweep(folder)
            return _add(folder, profile)
    except (OSError, ProfileError) as error:
        message = f"asked to keep measurements in {home(settings) or 'the cache folder'}; found: {error}. "
        message += "They serve this process only; set AUTOKERN_HOME to a private folder that can be written."
        if settings.strict:
            raise ProfileError(message) from error
        if _first("save"):
            warnings.warn(message, AutokernWarning, stacklevel=2)
        return None


def read_file(path: Path) -> Profile:
    """Return the profile in a file that the user named, in the form of `save` or of `write_file`.

    Raises
    ------
    ProfileError
        If the file cannot be read or holds no valid profile.
    """
    try:
        if os.path.isdir(path):
            raise ProfileError("it is a folder, and one file is read")
        with opened(os.open(path, os.O_RDONLY | FLAGS)) as fd:
            data = contents(fd, path, private=False)
        return decode(body_of(SCHEMA, data))
    except (OSError, ProfileError) as error:
        advice = "Name one file, a copy of what `autokern profile export FILE` or `calibrate --output FILE` wrote"
        raise ProfileError(f"asked for the profile in {path}; found: {error}. {advice}") from error


def write_file(path: Path, profile: Profile) -> None:
    """Write a profile as indented JSON, which begins with its schema, all or nothing.

    Raises
    ------
    ProfileError
        If the file cannot be written, or is there and no regular file.
    """
    try:
        told = {name: value for name, value in msgspec.structs.asdict(profile).items() if value}
        write_whole(path, msgspec.json.format(_encoded({"schema": SCHEMA, **told}), indent=2) + b"\n")
    except (OSError, ProfileError) as error:
        raise ProfileError(f"asked to write a profile to {path}; found: {error}. Name another file") from error


def clear(settings: Settings) -> list[Path]:
    """Remove every file in the folder that has a name of ours, and return those that are gone.

    Raises
    ------
    ProfileError
        If the folder cannot be trusted or read, and `settings.strict` is set.
    """
    try:
        with _opened_home(settings) as folder:
            return [folder.path / name for name in folder.names() if _OURS.fullmatch(name) and folder.remove(name)]
    except FileNotFoundError:
        return []
    except (OSError, ProfileError) as error:
        if settings.strict:
            raise ProfileError(f"asked to clear {home(settings)}; found: {error}. Remove it by hand") from error
        return []


@contextlib.contextmanager
def calibrating(settings: Settings, fingerprint: str, op: str) -> Iterator[bool]:
    """Hold the right to calibrate an op on a host; False at once where another process or thread holds it.

    Where nothing can be locked the answer is True: two calibrations cost seconds, none would cost every call. The
    right ends with the block or the process.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(_opened_home(settings, create=True))
            granted = stack.enter_context(folder.locked(_named(f"{fingerprint}.{op}.lock")))
        except (OSError, ProfileError):
            granted = True
        yield granted


def _reset() -> None:
    """Forget the warnings and log lines of this process (for tests)."""
    _reported.clear()


def _first(message: str) -> bool:
    known = message in _reported
    _reported.add(message)
    return not known


def _named(name: str) -> str:
    if not _OURS.fullmatch(name):
        raise ProfileError(f"{name!r} is no name of a file that autokern keeps: fingerprints are hexadecimal")
    return name


@contextlib.contextmanager
def _opened_home(settings: Settings, *, create: bool = False) -> Iterator[Folder]:
    """Open the folder for profiles, made where it is missing if that is asked for."""
    path = home(settings)
    if path is None:
        raise FileNotFoundError(errno.ENOENT, "this user has no cache folder")
    with contextlib.closing(Folder(path, private=True, create=create)) as folder:
        yield folder


def _kept(folder: Folder, fingerprint: str) -> tuple[Profile | None, Version | None]:
    """Return the profile under its name and the file's version; a bad file has lost the name when this raises."""
    name = _named(f"{fingerprint}.json")
    version = folder.version(name)  # taken first: a file that is replaced while being read counts as replaced
    try:
        profile = decode(unsealed(SCHEMA, folder.read(name)))
        if profile.fingerprint != fingerprint:
            raise ProfileError("it was measured on another host")
        return profile, version
    except FileNotFoundError:
        return None, None
    except NewerError:
        raise
    except (OSError, ProfileError) as error:
        if isinstance(error, OSError) and error.errno not in _FOREIGN:
            raise
        _quarantine(folder, name, version)
        raise error if isinstance(error, ProfileError) else ProfileError(str(error)) from error


def _quarantine(folder: Folder, name: str, version: Version | None) -> None:
    with contextlib.suppress(OSError):
        if folder.version(name) == version:  # otherwise another process has repaired it
            folder.replace(name, f"{name.removesuffix('.json')}.{secrets.token_hex(8)}.bad")
        bad = [n for n in folder.names() if n.endswith(".bad") and _OURS.fullmatch(n)]
        for old in sorted(bad, key=folder.modified)[:-_MOST_QUARANTINED]:
            folder.remove(old)


def _sweep(folder: Folder) -> None:
    with contextlib.suppress(OSError):
        for name in folder.names():
            if name.endswith(".tmp") and _OURS.fullmatch(name) and folder.modified(name) < time.time() - _STALE:
                folder.remove(name)


def _add(folder: Folder, profile: Profile) -> Path:
    """Publish the union of the kept and the given profile, again until no key of it is missing on disk."""
    name, wanted, published = _named(f"{profile.fingerprint}.json"), profile, False
    with contextlib.ExitStack() as stack:
        try:
            locked = stack.enter_context(folder.locked(f"{profile.fingerprint}.lock", _PATIENCE))
        except OSError:
            locked = False
        for _ in range(_TRIES):
            kept, version = _kept_or_none(folder, profile.fingerprint)
            if published and kept is not None and _keys(wanted) <= _keys(kept):
                return folder.path / name
            if kept is not None:
                wanted = wanted.merge(kept).merge(profile)
            with folder.temporary(profile.fingerprint, sealed(SCHEMA, _encoded(wanted))) as temporary:
                if folder.version(name) != version:
                    continue  # another process published since we read: its keys come first into ours
                folder.replace(temporary, name)
            folder.sync()
            published = True
            if not locked:  # a writer that checked the version just before our rename renames during this sleep
                time.sleep(random.uniform(0.002, 0.02))
    raise ProfileError(f"{name} was replaced by other processes {_TRIES} times")


def _kept_or_none(folder: Folder, fingerprint: str) -> tuple[Profile | None, Version | None]:
    try:
        return _kept(folder, fingerprint)
    except NewerError:
        raise
    except ProfileError as error:
        if _first(f"load {fingerprint}: {error}"):
            _log.warning("replaced the profile of host %s in %s: %s", fingerprint, folder.path, error)
        return None, folder.version(f"{fingerprint}.json")


def _keys(profile: Profile) -> set[object]:
    timings = {(trial.problem, name) for trial in profile.trials for name in trial.timings}
    bans = {(ban.op, ban.candidate, ban.dtype, ban.device) for ban in profile.banned}
    return {*timings, *bans, *profile.levels, *profile.setup, *profile.fruitless.items()}


def _encoded(profile: Profile | dict[str, object]) -> bytes:
    """Return the JSON text, proven to be readable: a text that `decode` refuses must not replace one it accepts."""
    try:
        data = msgspec.json.encode(profile)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProfileError(f"the profile cannot be written as JSON: {error}") from error
    if len(sealed(SCHEMA, data)) > LARGEST:
        raise ProfileError(f"the profile is larger than {LARGEST} bytes")
    decode(data)
    return data
