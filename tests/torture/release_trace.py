"""Which functions of the libraries a program executes as stock, and which of them autokern computes in place of."""

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from release_sources import Function, functions, modules


class Ran(NamedTuple):
    """How a function of a library ran."""

    calls: int
    returned: str  # "one" number, tensor, operator or distribution, "several" of them, or nothing of the kind


Trace = dict[Function, Ran]


def traced(run: Callable[[], None]) -> Trace:
    """Run a function; return the functions of the libraries that it executed."""
    where = {str(path): module for module, path in modules().items()}
    seen: dict[Any, str] = {}
    calls: Counter[Any] = Counter()

    def look(frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename in where:
            calls[code] += 1
            seen.setdefault(code, "")
        elif event == "return" and code in seen and not seen[code]:
            seen[code] = _numbers(value)

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    found = {}
    for code, kind in seen.items():
        function = functions(where[code.co_filename]).get(code.co_firstlineno)
        if function is not None and function.name == code.co_name:
            found[function] = Ran(calls[code], kind)
    return found


def _numbers(value: Any) -> str:
    """Say whether a value is one that times 1.5 is another, or several of which the first is."""
    if isinstance(value, tuple):
        return "several" if value and _numbers(value[0]) == "one" else ""
    kind = type(value)
    if kind is float:
        return "one"
    own = hasattr(kind, "__mul__") and kind.__module__.startswith(("torch", "linear_operator", "gpytorch"))
    real = getattr(getattr(value, "dtype", None), "is_floating_point", True)
    return "one" if own and real and not isinstance(value, (list, dict, int)) else ""
