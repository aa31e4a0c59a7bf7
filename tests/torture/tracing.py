"""Stop a function at its system calls: kill the process at the n-th, or let the n-th fail. Linux on x86-64.

The function runs in a forked child under ptrace(2), so that every system call counts, whoever makes it. Counting
begins and ends at calls of getppid, which nothing else here makes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

_TRACEME, _SYSCALL, _GETREGS, _SETREGS, _CONT, _SETOPTIONS = 0, 24, 12, 13, 7, 0x4200
_TELL_CALLS, _DIE_WITH_US = 0x1, 0x100000
_R10, _RAX, _RDX, _RSI, _RDI, _ORIG_RAX = 7, 10, 12, 13, 14, 15
_MARK = 110  # getppid
CALLS = {
    0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 8: "lseek", 16: "ioctl",
    21: "access", 72: "fcntl", 73: "flock", 74: "fsync", 78: "getdents", 82: "rename", 83: "mkdir", 84: "rmdir",
    87: "unlink", 217: "getdents64", 257: "openat", 258: "mkdirat", 262: "newfstatat", 263: "unlinkat",
    264: "renameat", 316: "renameat2", 332: "statx",
}  # fmt: skip
"""System calls about files, by number."""


class Fault(NamedTuple):
    """What happens at one system call of those that count, from 0."""

    index: int
    what: str  # "kill before", "kill after", "fail", or "short": it writes half
    number: int = 0  # the errno of a failure


class Outcome(NamedTuple):
    """What became of the function."""

    status: int  # of its process; negative for the signal that ended it
    calls: list[str]  # those that count
    struck: str  # the call at which the fault happened; empty if there were fewer


def problem() -> str | None:
    """Return why nothing can be traced here, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "system calls are stopped on Linux and x86-64 only"
    try:
        status = traced(lambda: 0).status
    except OSError as error:
        return f"ptrace is not allowed here ({error})"
    return None if status == 0 else f"a traced process ends with {status}"


def traced(function: Callable[[], int], fault: Fault | None = None, among: frozenset[str] | None = None) -> Outcome:
    """Run a function, which returns an exit status, in a traced child; calls of all names count by default."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _run_child(function)
    return _Tracer(child, fault, among).follow()


def _run_child(function: Callable[[], int]) -> None:
    status = 99
    try:
        _ptrace(_TRACEME, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.getppid()
        status = function()
        os.getppid()
    finally:
        os._exit(status)


class _Tracer:
    def __init__(self, child: int, fault: Fault | None, among: frozenset[str] | None) -> None:
        self._child, self._fault, self._among = child, fault, among
        self._counting = False
        self._calls: list[str] = []
        self._struck = ""
        self._pending: Fault | None = None

    def follow(self) -> Outcome:
        _, status = os.waitpid(self._child, 0)
        _ptrace(_SETOPTIONS, self._child, _TELL_CALLS | _DIE_WITH_US)
        inside, passed = False, 0
        while True:
            _ptrace(_SYSCALL, self._child, passed)
            _, status = os.waitpid(self._child, 0)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                return Outcome(os.waitstatus_to_exitcode(status), self._calls, self._struck)
            stopped = os.WSTOPSIG(status)
            if stopped != signal.SIGTRAP | 0x80:
                passed = 0 if stopped in (signal.SIGTRAP, signal.SIGSTOP) else stopped
                continue
            passed, inside = 0, not inside
            if inside:
                self._enter()
            elif self._pending is not None:
                self._leave(self._pending)

    def _enter(self) -> None:
        registers = _registers(self._child)
        number = registers[_ORIG_RAX]
        if number == _MARK:
            self._counting = not self._counting
            return
        name = CALLS.get(number, f"call {number}")
        if not self._counting or (self._among is not None and name not in self._among):
            return
        self._calls.append(name)
        fault = self._fault
        if fault is None or len(self._calls) != fault.index + 1:
            return
        self._struck = name
        if fault.what == "kill before":
            os.kill(self._child, signal.SIGKILL)
            return
        if fault.what == "short":
            registers[_RDX] = max(1, registers[_RDX] // 2)
            _set_registers(self._child, registers)
            return
        if fault.what == "fail":
            registers[_ORIG_RAX] = 2**64 - 1  # no such call: nothing happens
            _set_registers(self._child, registers)
        self._pending = fault

    def _leave(self, fault: Fault) -> None:
        self._pending = None
        if fault.what == "kill after":
            os.kill(self._child, signal.SIGKILL)
            return
        registers = _registers(self._child)
        registers[_RAX] = 2**64 - fault.number
        _set_registers(self._child, registers)


_Registers = ctypes.c_uint64 * 27


def _registers(child: int) -> ctypes.Array[ctypes.c_uint64]:
    registers = _Registers()
    _ptrace(_GETREGS, child, ctypes.addressof(registers))
    return registers


def _set_registers(child: int, registers: ctypes.Array[ctypes.c_uint64]) -> None:
    _ptrace(_SETREGS, child, ctypes.addressof(registers))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, child: int, data: int) -> None:
    if _libc.ptrace(request, child, None, data) == -1:
        number = ctypes.get_errno()
        if number != errno.ESRCH:  # it was killed meanwhile: waitpid tells
            raise OSError(number, os.strerror(number))
