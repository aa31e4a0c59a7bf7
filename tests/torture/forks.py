"""Processes that are forked to run one function."""

import os
import sys
import traceback
from collections.abc import Callable


def forked(function: Callable[[], int], user: int | None = None) -> int:
    """Start a process, of another user if one is named, that ends with what a function returns; return its number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 99
    try:
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        status = function()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ended(child: int) -> int:
    """Wait for a process; return its exit status, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
