"""Private folders and atomic writes, for `tuning/store.py`.

Names are looked up relative to an open folder, so that no other user can exchange a component of the path. Files are
checked after they are opened, never before. A file appears complete under its name or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from autokern.core.errors import ProfileError, suppressed, uninterrupted

LARGEST = 64 * 2**20  # largest file that is read, in bytes
FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | FLAGS
_BY_NAME = os.open not in os.supports_dir_fd  # Windows: folders have no descriptors, and files no owners to check


class Folder(contextlib.ExitStack):
    """An open folder, closed at the end of the block; `create` makes it and its missing parents, with mode 0700.

    If `private`, ProfileError unless this user owns it, no other user may write to it, and no other's link leads to it.
    """

    def __init__(self, path: Path, *, private: bool, create: bool = False) -> None:
        super().__init__()
        self.path = path
        self.fd: int | None = None
        if not _BY_NAME:
            self.fd = _reached(path, create) if private else os.open(path, _FOLDER)
            self.callback(os.close, self.fd)
        elif create:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Open a file, never through a link and never waiting for a pipe's other end."""
        return os.open(self._at(name), flags | FLAGS | _NOFOLLOW, mode, dir_fd=self.fd)

    def modified(self, name: str) -> float:
        """Return the time of a file's last change, in seconds of the Unix epoch."""
        return os.stat(self._at(name), dir_fd=self.fd, follow_symlinks=False).st_mtime

    def names(self) -> list[str]:
        """Return the names in the folder, sorted."""
        return sorted(os.listdir(self.path if self.fd is None else self.fd))

    def replace(self, name: str, new: str) -> None:
        """Rename a file, and replace the file of the new name."""
        os.replace(self._at(name), self._at(new), src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> bool:
        """Remove a file or an empty folder; return False, and raise nothing, if that fails."""
        for undo in (os.unlink, os.rmdir):
            with suppressed(OSError):
                undo(self._at(name), dir_fd=self.fd)
                return True
        return False

    def write(self, name: str, data: bytes | None, mode: int = 0o600) -> None:
        """Write a file atomically and durably; without data, only check that this would work."""
        temporary = f"{Path(name).stem}.{secrets.token_hex(8)}.tmp"
        fd = self.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with open(fd, "wb") as file:
                file.write(data or b"")
                file.flush()
                os.fsync(fd)
            if data is not None:
                self.replace(temporary, name)
                try:
                    if self.fd is not None:  # make the new name durable
                        os.fsync(self.fd)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                        raise
        finally:
            self.remove(temporary)

    @contextlib.contextmanager
    def locked(self, name: str, patience: float = 0.0) -> Iterator[bool]:
        """Yield whether an advisory lock was acquired within `patience` seconds; OSError where there are no locks."""
        try:
            import fcntl
        except ImportError:
            raise OSError(errno.ENOSYS, "this platform has no flock") from None
        deadline, held = time.monotonic() + patience, False
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, fd := self.open(name, os.O_RDWR | os.O_CREAT))
            while not held:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    held = True
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(random.uniform(0.001, 0.01))
            try:
                yield held
            finally:
                if held:  # explicitly: after close alone, a forked child's copy of the descriptor would keep the lock
                    with suppressed(OSError):
                        fcntl.flock(fd, fcntl.LOCK_UN)

    def _at(self, name: str) -> str:
        return str(self.path / name) if self.fd is None else name


def write_whole(path: Path, data: bytes | None) -> None:
    """Write a file atomically under a path that the user names; without data, only check that this would work."""
    target = Path(os.path.realpath(path))  # the target of a link is replaced, not the link
    try:
        if target.exists() and not target.is_file():  # a rename would replace even a device
            raise ProfileError("it is no regular file")
        with Folder(target.parent, private=False) as folder:
            folder.write(target.name, data, mode=0o666)
    except uninterrupted(OSError, ProfileError) as error:
        found = getattr(error, "strerror", None) or error
        raise ProfileError(f"asked to write {path}; found: {found}. Name another file") from error


def _reached(path: Path, create: bool, links: int = 40) -> int:
    """Open a private folder by its components, so that none can be exchanged for a link after its check."""
    fd = os.open(path.anchor, _FOLDER)
    try:
        for place, name in enumerate(path.parts[1:], 1):
            step = _step(fd, name, create)
            if step is None:  # a link: its target replaces the path up to here
                if links == 0:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                target = Path(*path.parts[:place], _link(fd, name, path), *path.parts[place + 1 :])
                return _reached(target, create, links - 1)
            os.close(fd)
            fd = step
        _check_private(os.fstat(fd), path)
        return os.open(".", _FOLDER, dir_fd=fd)
    finally:
        os.close(fd)


def _step(fd: int, name: str, create: bool) -> int | None:
    """Open a subfolder, created if it is missing; None if the name is a link."""
    flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | _NOFOLLOW | FLAGS
    try:
        return os.open(name, flags, dir_fd=fd)
    except FileNotFoundError:
        if not create:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=fd)
        return _step(fd, name, False)
    except OSError as error:
        is_link = error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK)
        if is_link and stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            return None
        raise


def _link(fd: int, name: str, path: Path) -> str:
    """Return the target of a link; ProfileError if a user other than this one and root made it, or if it changes."""
    seen = []
    for _ in range(2):
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if info.st_uid not in (0, os.geteuid()):
            raise ProfileError(f"{path} leads through {name}, a link that another user made")
        seen.append((info.st_dev, info.st_ino, info.st_ctime_ns, os.readlink(name, dir_fd=fd)))
    if seen[0] != seen[1]:
        raise ProfileError(f"{path} leads through {name}, a link that is being changed")
    return seen[0][-1]


def contents(fd: int, name: Path | str, *, private: bool) -> bytes:
    """Return the content of a file and close it; ProfileError if it is irregular, too large, or not `private`."""
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise ProfileError(f"{name} is no regular file")
        if private:
            _check_private(info, name)
        with open(fd, "rb", closefd=False) as file:
            data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ProfileError(f"{name} is larger than {LARGEST} bytes")
    return data


def _check_private(info: os.stat_result, name: Path | str) -> None:
    if _BY_NAME:
        return
    if info.st_uid != os.geteuid():
        raise ProfileError(f"{name} belongs to another user")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ProfileError(f"other users may write to {name} (chmod go-w would forbid it)")
