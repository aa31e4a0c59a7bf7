"""Layers: the files that hold profiles, in the home folder or named by ``AUTOKERN_PROFILE``, and what is in force.

Nothing is written here. What was read of a file serves the process while the file's identifier stays the same. Whose
profile a file holds is told by its name, or by its beginning: the measurements themselves are read only when they are
needed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autokern.core.errors import ProfileError
from autokern.core.settings import Settings
from autokern.system.files import FLAGS, Folder, Version, beginning, identified, opened
from autokern.tuning import store
from autokern.tuning.profile import Profile

__all__ = ["File", "files", "in_force", "leaves_aside", "lone_file", "merged", "origin", "whole"]

_log = logging.getLogger("autokern")

_BEGINNING = 16_384
"""Bytes that hold the description of a host, which comes first."""
_HOST = re.compile(rb'\s*\{\s*(?:"schema"\s*:\s*\d{1,6}\s*,\s*)?"host"\s*:\s*')
_FINGERPRINT = re.compile(r'\s*,\s*"fingerprint"\s*:\s*"([0-9a-f]{8,64})"')
_OF_ONE_HOST = re.compile(r"([0-9a-f]{8,64})\.json")


class File(NamedTuple):
    """A file that may hold a profile.

    Parameters
    ----------
    path : Path
        Where it is.
    version : tuple or None
        Identifier of its version; None if it is missing.
    private : bool
        Whether it lies in the home folder and must be this user's own; else the user named it or its folder.
    """

    path: Path
    version: Version | None
    private: bool

    @property
    def fingerprint(self) -> str:
        """The host whose profile it holds, in the home folder by its name; empty where nothing tells."""
        name = _OF_ONE_HOST.fullmatch(self.path.name)
        told = name[1] if name else ""
        return told if self.private else _head(self)[1] or told

    @property
    def host(self) -> dict[str, Any]:
        """The fields of the host; empty where they cannot be read."""
        return _head(self)[0]


def whole(file: File) -> Profile:
    """Return the profile in a file.

    Raises
    ------
    OSError, ProfileError
        If it cannot be read or trusted.
    """
    found = _read(file)
    if isinstance(found, Profile):
        return found
    raise ProfileError(found)


def lone_file(settings: Settings) -> Path | None:
    """Return the only layer if it is no folder: its profile is used as it is, whatever host it is of."""
    layers = settings.profile or ()
    return layers[0] if len(layers) == 1 and not os.path.isdir(layers[0]) else None


def leaves_aside(settings: Settings) -> bool:
    """Whether what is kept on this machine must not decide, since a later calibration may change it."""
    return settings.deterministic and settings.profile is None


def files(settings: Settings) -> list[File]:
    """Return the files of the layers in their order, or where none is named, those in the home folder.

    Of a folder they are those that end in ``.json``.

    Raises
    ------
    ProfileError
        If a layer is missing or cannot be read, or a file that was named is no profile.
    """
    if settings.profile is None:
        return _in_home(settings)
    found: list[File] = []
    for path in settings.profile:
        if os.path.isdir(path):
            found += _in_folder(path)
        else:
            found.append(File(path, _version(path), private=False))
            whole(found[-1])
    return found


def merged(found: Sequence[File]) -> Profile | None:
    """Return what files of one host hold together; of a problem and candidate in several, the first file's timing.

    Raises
    ------
    OSError, ProfileError
        If one of them cannot be read or trusted.
    """
    profiles = [whole(file) for file in found]
    return functools.reduce(Profile.merge, reversed(profiles)) if profiles else None


def in_force(settings: Settings, fingerprint: str) -> Profile | None:
    """Return what the layers hold of a host, or where none is named, the home folder; None if that is nothing.

    Raises
    ------
    ProfileError
        If a layer is missing or cannot be read, or one that is in force is no profile; of the home folder only if
        `settings.strict` is set.
    """
    if settings.profile is None:
        return store.load(settings, fingerprint)
    if (alone := lone_file(settings)) is not None:
        return store.read_file(alone)
    return merged([file for file in files(settings) if file.fingerprint == fingerprint])


def origin(settings: Settings, fingerprint: str) -> str:
    """Return in lines which files are in force, and which layers are not."""
    if settings.profile is None:
        home = store.home(settings)
        return f"kept in\n{home}" if home is None else f"kept in\n{home / f'{fingerprint}.json'}"
    if (alone := lone_file(settings)) is not None:
        return f"pinned by AUTOKERN_PROFILE:\n{alone}"
    there = files(settings)
    own = [str(file.path) for file in there if file.fingerprint == fingerprint]
    others = [str(file.path) for file in there if file.fingerprint not in ("", fingerprint)]
    lines = ["in force by AUTOKERN_PROFILE:", *own] if own else []
    return "\n".join([*lines, *(["of other machines, priors only:", *others] if others else [])])


def _version(path: Path) -> Version | None:
    try:
        return identified(path.stat())
    except OSError:
        return None


def _in_folder(folder: Path) -> list[File]:
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except OSError as error:
        advice = "Name a folder that can be read in AUTOKERN_PROFILE, or leave it out"
        raise ProfileError(f"asked for the profiles in {folder}; found: {error}. {advice}") from error
    return [File(path, version, private=False) for path in paths if (version := _version(path)) is not None]


def _in_home(settings: Settings) -> list[File]:
    try:
        with store.opened_home(settings) as folder:
            found = ((name, folder.version(name)) for name in folder.names() if _OF_ONE_HOST.fullmatch(name))
            return [File(folder.path / name, version, private=True) for name, version in found if version is not None]
    except (OSError, ProfileError):
        return []


@functools.lru_cache(maxsize=16)
def _read(file: File) -> Profile | str:
    """Return the profile in a file, or why it is none; a fault that may pass is raised."""
    try:
        if not file.private:
            return store.read_file(file.path)
        with contextlib.closing(Folder(file.path.parent, private=True)) as folder:
            return store.examined(folder, file.path.stem)
    except ProfileError as error:
        if isinstance(error.__cause__, OSError):
            raise
        return str(error)


@functools.lru_cache(maxsize=512)
def _head(file: File) -> tuple[dict[str, Any], str]:
    """Return fields and fingerprint of the host at the beginning of a file; both empty where they are not there."""
    try:
        data = _beginning(file)
        data = data.partition(b"\n")[2] if data.startswith(b'{"autokern"') else data
        if match := _HOST.match(data):
            text = data[match.end() :].decode(errors="replace")
            fields, end = json.JSONDecoder().raw_decode(text)
            name = _FINGERPRINT.match(text, end)
            if isinstance(fields, dict) and name:
                return fields, name[1]
        profile = whole(file)  # its parts are in another order
        return profile.host, profile.fingerprint
    except (OSError, ProfileError, ValueError, RecursionError) as error:
        _log.debug("%s holds no profile: %s", file.path, error)
        return {}, ""


def _beginning(file: File) -> bytes:
    if not file.private:
        with opened(os.open(file.path, os.O_RDONLY | FLAGS)) as fd:
            return beginning(fd, file.path, _BEGINNING, private=False)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(contextlib.closing(Folder(file.path.parent, private=True)))
        fd = stack.enter_context(opened(folder.open(file.path.name, os.O_RDONLY)))
        return beginning(fd, file.path, _BEGINNING, private=True)
