"""The sources of the libraries, where their functions stand, and copies with one thing changed."""

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIBRARIES = ("linear_operator", "gpytorch", "botorch")
Definition = ast.FunctionDef | ast.AsyncFunctionDef


class Function(NamedTuple):
    """A function of a library."""

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
        """Module, class and name."""
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
    """Return the source of a module."""
    return modules()[module].read_text(encoding="utf-8")


def tree(module: str) -> ast.Module:
    """Parse a module anew, to be changed."""
    return ast.parse(text(module))


@functools.cache
def functions(module: str) -> dict[int, Function]:
    """Return the functions of a module by their first line."""
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
    """Return the modules in whose source a name occurs."""
    return tuple(module for module in modules() if name in text(module))


def renamed(name: str, to: str) -> dict[str, str]:
    """Return the sources in which a name is another one, as identifier and in lists of names."""
    word = re.compile(rf"\b{name}\b")
    return {module: word.sub(to, text(module)) for module in naming(name) if word.search(text(module))}
