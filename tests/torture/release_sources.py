"""The libraries' sources, where their functions stand, copies with one thing changed, and what a program executes."""

import ast
import functools
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

LIBRARIES = ("linear_operator", "gpytorch", "botorch")
Definition = ast.FunctionDef | ast.AsyncFunctionDef


class Function(NamedTuple):
    module: str
    holder: str  # qualified name of its class, or of the function that it is nested in; empty for one of the module
    name: str
    line: int  # the first, that of a decorator if it has one
    nested: bool  # in another function

    @property
    def outer(self) -> str:
        """Qualified name within the module, of the outermost function if it is nested."""
        return f"{self.holder}.{self.name}".strip(".").partition(".<locals>")[0]

    @property
    def qualified(self) -> str:
        return ".".join(filter(None, (self.module, self.holder, self.name)))


@functools.cache
def modules() -> dict[str, Path]:
    """Return the files of all modules of the libraries, by dotted name; nothing is imported."""
    found = {}
    for library in LIBRARIES:
        spec = importlib.util.find_spec(library)
        for place in (spec.submodule_search_locations or []) if spec else []:
            for path in sorted(Path(place).rglob("*.py")):
                parts = (library, *path.relative_to(place).with_suffix("").parts)
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def text(module: str) -> str:
    return modules()[module].read_text(encoding="utf-8")


def tree(module: str) -> ast.Module:
    return ast.parse(text(module))


@functools.cache
def functions(module: str) -> dict[int, Function]:
    return {one.line: one for one, _ in _walk(module, tree(module), "", False)}


def at(function: Function, parsed: ast.Module) -> Definition:
    """Return the definition of a function in a tree of its module."""
    return next(node for one, node in _walk(function.module, parsed, "", False) if one == function)


def _walk(module: str, node: ast.AST, holder: str, nested: bool) -> Iterator[tuple[Function, Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            line = min([child.lineno, *(one.lineno for one in child.decorator_list)])
            yield Function(module, holder, child.name, line, nested), child
            yield from _walk(module, child, f"{holder}.{child.name}.<locals>".strip("."), True)
        elif isinstance(child, ast.ClassDef):
            yield from _walk(module, child, f"{holder}.{child.name}".strip("."), nested)
        else:
            yield from _walk(module, child, holder, nested)


@functools.cache
def naming(name: str) -> tuple[str, ...]:
    return tuple(module for module in modules() if name in text(module))


def renamed(name: str, to: str) -> dict[str, str]:
    """Return the sources in which a name is another one, as identifier and in lists of names."""
    word = re.compile(rf"\b{name}\b")
    return {module: word.sub(to, text(module)) for module in naming(name) if word.search(text(module))}


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
