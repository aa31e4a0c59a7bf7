"""Profiles in files: private, checked, atomic; a faulty file costs speed and never a call.

One file per host fingerprint: a header with a checksum, then the profile as JSON. Writers add keys and remove none.
Correctness rests on rename; locks only save work. A file that ``AUTOKERN_PROFILE`` pins is only read. Trouble with the
home folder is told once, or raised as ProfileError if `settings.strict` is set.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
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
from autokern.tuning.profile import SCHEMA, Profile, decode

_log = logging.getLogger("autokern")
_reported: set[str] = set()  # warnings and log lines of this process; the only state here

_MOST_QUARANTINED = 5
_STALE = 3600.0  # seconds after which no process can still be writing a temporary file
_TRIES = 64  # in every round of racing writers one succeeds: enough for so many without a lock
_PATIENCE = 0.25  # seconds to hope for the writers' lock, which is held about as long as an fsync takes

_OURS = re.compile(r"[0-9a-f]{8,64}(\.json|\.[0-9a-f]{16}\.(tmp|bad)|(\.[a-z0-9_]+)?\.lock)")
_SEALED = b'{"autokern":"profile","schema":'  # of every schema, so that an older autokern knows a newer file
_SCHEMA = re.compile(rb'\s*\{\s*(?:"autokern":\s*"profile",\s*)?"schema":\s*(\d{1,6})\b')

# Faults of the file itself. Others (EMFILE, ESTALE, EIO, ...) may pass and must not cost a good profile its name.
_FOREIGN = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EISDIR)


class _NewerError(ProfileError):
    """A newer autokern wrote the file; this one must not change it."""


def sealed(schema: int, body: bytes) -> bytes:
    """Return the body behind one header line that holds its schema and a checksum over everything, header included."""

    def header(digest: str) -> bytes:
        return _SEALED + f'{schema},"sha256":"{digest}"}}\n'.encode()

    return header(hashlib.sha256(header("0" * 64) + body).hexdigest()) + body


def _unsealed(data: bytes, plain: bool = False) -> bytes:
    """Return the body of a sealed file, or all of a `plain` one where that is allowed."""
    claim, body = _SCHEMA.match(data), data.partition(b"\n")[2]
    found = int(claim[1]) if claim else SCHEMA
    plain = plain and not data.startswith(b'{"autokern"')
    whole = plain or data == sealed(found, body)
    # A newer schema is accepted without a check, as its checksum may differ; but not one that a flipped bit explains.
    flipped = found < 10 and (found ^ SCHEMA).bit_count() == 1
    if found > SCHEMA and (whole or not flipped):
        raise _NewerError(f"a newer autokern wrote it (schema {found}, this one reads {SCHEMA}); upgrade autokern")
    if not whole:
        raise ProfileError("it is damaged: the checksum does not match")
    if found < SCHEMA:
        raise ProfileError(f"an earlier autokern wrote it (schema {found}, this one reads {SCHEMA}); measure again")
    return data if plain else body


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
    """Return the pinned profile, whatever host it is of, or the profile kept for a host, or None."""
    if settings.profile is None:
        return load(settings, fingerprint)
    try:
        return read_file(settings.profile)
    except ProfileError as error:
        if settings.strict:
            raise
        if _first(f"pinned: {error}"):
            warnings.warn(f"{error}. No profile is used.", AutokernWarning, stacklevel=2)
        return None


def origin(settings: Settings, fingerprint: str) -> str:
    """Return in lines which file is in force."""
    if settings.profile is not None:
        return f"pinned by AUTOKERN_PROFILE:\n{settings.profile}"
    path = home(settings)
    return f"kept in\n{path if path is None else path / f'{fingerprint}.json'}"


def load(settings: Settings, fingerprint: str) -> Profile | None:
    """Return the profile kept for a host, or None; a file that cannot be trusted is put aside and counts as none."""
    try:
        with _opened_home(settings) as folder:
            found, _, error = _kept(folder, fingerprint)
            if error is None:
                return found
            raise error
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
    """
    try:
        with _opened_home(settings, create=True) as folder:
            _tidy(folder)
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
    """Return the profile in a file that the user named, in the form of `save` or of `write_file`."""
    try:
        if os.path.isdir(path):
            raise ProfileError("it is a folder, and one file is read")
        with opened(os.open(path, os.O_RDONLY | FLAGS)) as fd:
            data = contents(fd, path, private=False)
        return decode(_unsealed(data, plain=True))
    except (OSError, ProfileError) as error:
        advice = "Name one file, a copy of what `autokern profile export FILE` or `calibrate --output FILE` wrote"
        raise ProfileError(f"asked for the profile in {path}; found: {error}. {advice}") from error


def write_file(path: Path, profile: Profile) -> None:
    """Write a profile as indented JSON, which begins with its schema, all or nothing."""
    try:
        told = {name: value for name, value in msgspec.structs.asdict(profile).items() if value}
        write_whole(path, msgspec.json.format(_encoded({"schema": SCHEMA, **told}), indent=2) + b"\n")
    except (OSError, ProfileError) as error:
        raise ProfileError(f"asked to write a profile to {path}; found: {error}. Name another file") from error


def clear(settings: Settings) -> list[Path]:
    """Remove every file in the folder that has a name of ours, and return those that are gone."""
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


def _kept(folder: Folder, fingerprint: str) -> tuple[Profile | None, Version | None, ProfileError | None]:
    """Return the profile under its name, the file's version, and why there is none; a bad file has lost the name."""
    name = _named(f"{fingerprint}.json")
    version = folder.version(name)  # taken first: a file that is replaced while being read counts as replaced
    try:
        profile = decode(_unsealed(folder.read(name)))
        if profile.fingerprint != fingerprint:
            raise ProfileError("it was measured on another host")
        return profile, version, None
    except FileNotFoundError:
        return None, None, None
    except _NewerError:
        raise
    except (OSError, ProfileError) as error:
        if isinstance(error, OSError) and error.errno not in _FOREIGN:
            raise
        with contextlib.suppress(OSError):
            if folder.version(name) == version:  # otherwise another process has repaired it
                folder.replace(name, f"{fingerprint}.{secrets.token_hex(8)}.bad")
                version = None
        _tidy(folder)
        return None, version, error if isinstance(error, ProfileError) else ProfileError(str(error))


def _tidy(folder: Folder) -> None:
    """Remove stale temporary files, and all but the latest damaged ones."""
    with contextlib.suppress(OSError):
        ours = [name for name in folder.names() if _OURS.fullmatch(name)]
        bad = sorted((name for name in ours if name.endswith(".bad")), key=folder.modified)[:-_MOST_QUARANTINED]
        temporary = (name for name in ours if name.endswith(".tmp"))
        for name in (*bad, *(t for t in temporary if folder.modified(t) < time.time() - _STALE)):
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
            kept, version, error = _kept(folder, profile.fingerprint)
            if error is not None and _first(f"load {profile.fingerprint}: {error}"):
                _log.warning("replaced the profile of host %s in %s: %s", profile.fingerprint, folder.path, error)
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
