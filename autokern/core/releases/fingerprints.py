"""Fingerprints of functions, classes and constants: hashes of code, syntax, bases and values, without docstrings."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

_FUNCTION, _DOCUMENTED = 0x1, 0x4000000
"""Flags of code objects: of a function, and, from Python 3.13 on, of one that has a docstring as its first constant."""
_SIMPLE = {bool, bytes, complex, float, int, str, type(None), type(...)}
_UNSTABLE = {"annotation", "ctx", "kind", "returns", "type_comment", "type_params"}
"""Fields of syntax trees without effect at run time, or absent in some versions of Python."""
_UNWRAPPED = {"abstractmethod", "classmethod", "overload", "property", "setter", "staticmethod"}
"""Decorators that do not wrap the function in another one."""


def _hashed(content: object, code: bytes = b"") -> str:
    found = hashlib.blake2b(code, digest_size=5)
    found.update(repr(content).encode(errors="replace"))
    return found.hexdigest()


@functools.cache
def fingerprint(code: CodeType) -> str:
    """Return the fingerprint of a code object."""
    constants, flags = code.co_consts, code.co_flags
    if sys.version_info >= (3, 13):
        constants = constants[1:] if flags & _DOCUMENTED else constants
    elif flags & _FUNCTION and code.co_name[0] != "<" and constants and constants[0].__class__ is str:
        constants = (None, *constants[1:])
    if not _SIMPLE.issuperset(map(type, constants)):
        constants = tuple(_constant(value) for value in constants)
    content = (
        constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, flags & ~_DOCUMENTED,
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount,
    )  # fmt: skip
    return _hashed(content, code.co_code)


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return fingerprint(value)
    return sorted(map(repr, value)) if value.__class__ is frozenset else value


def _with(code: str, defaults: Any) -> str:
    """Return the fingerprint of a function from its code's fingerprint and its defaults."""
    return _hashed((code, defaults)) if any(defaults) else code


def of_value(value: Any) -> str:
    """Return the fingerprint of a literal, or of a class by the names of its bases; empty for any other value."""
    if isinstance(value, type):
        return _hashed(["bases", *(base.__name__ for base in value.__bases__)])
    return "" if (plain := _plain(value)) is ... or (type(plain) is tuple and ... in plain) else _hashed(["is", plain])


def of_function(function: FunctionType) -> tuple[str, str]:
    """Return two fingerprints of a function: with its defaults, and without them, marked by ``~``."""
    code = fingerprint(function.__code__)
    if not (function.__defaults__ or function.__kwdefaults__):
        return code, f"~{code}"
    named = sorted((function.__kwdefaults__ or {}).items())
    defaults = (
        [_plain(value) for value in function.__defaults__ or ()],
        [(name, _plain(value)) for name, value in named],
    )
    return _with(code, defaults), f"~{code}"


def _plain(value: Any) -> Any:
    """Return a literal, or a tuple of literals, as it is; ``...`` in place of any other value."""
    if type(value) is tuple:
        return tuple(_plain(item) for item in value)
    return value if type(value) in _SIMPLE else ...


def definitions(source: str, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield each definition of a source: its qualified name, the fingerprint of its code, and that of its syntax.

    The code's fingerprint begins with ``~`` if it leaves out defaults, whose values are known only at run time. For a
    class, or a constant of a module or class, both are the fingerprint of the value. A decorated function is yielded
    again for each wrapper, with ``@1``, ``@2`` and so on in place of both.
    """
    tree, nodes = ast.parse(source), {}
    imported = (name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names)
    yield from _values(tree, "", {name.asname: name.name for name in imported if name.asname})
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            nodes[first, getattr(node, "name", "<lambda>")] = node
    yield from _within(compile(source, path, "exec", dont_inherit=True), "", nodes)


def _values(holder: Any, prefix: str, aliases: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for node in holder.body:
        mark, name = "", ""
        if isinstance(node, ast.ClassDef):
            yield from _values(node, f"{prefix}{node.name}.", aliases)
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            names = [getattr(base, "id", getattr(base, "attr", "")) for base in bases]
            name, mark = node.name, _hashed(["bases", *(aliases.get(name, name) for name in names or ["object"])])
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = getattr(target, "id", "")
            with contextlib.suppress(ValueError):
                mark = of_value(ast.literal_eval(node.value))
        if name and mark:
            yield f"{prefix}{name}", mark, mark


def _within(code: CodeType, prefix: str, nodes: dict[tuple[int, str], Any]) -> Iterator[tuple[str, str, str]]:
    for inner in code.co_consts:
        if not isinstance(inner, CodeType):
            continue
        name, is_function = prefix + inner.co_name, inner.co_flags & _FUNCTION
        node = nodes.get((inner.co_firstlineno, inner.co_name))
        if is_function and node is not None:
            try:
                marked = _with(fingerprint(inner), _written(node.args))
            except ValueError:
                marked = f"~{fingerprint(inner)}"
            yield name, marked, _hashed(_syntax(node))
            decorators = [ast.unparse(one).partition("(")[0] for one in getattr(node, "decorator_list", ())]
            wrapped = [one for one in decorators if one.rpartition(".")[2] not in _UNWRAPPED]
            yield from ((name, f"@{layer}", f"@{layer}") for layer in range(1, len(wrapped) + 1))
        yield from _within(inner, f"{name}.<locals>." if is_function else f"{name}.", nodes)


def _written(arguments: ast.arguments) -> Any:
    """Return the literal defaults of a signature; ValueError where a default is known only at run time."""
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    named = [(argument.arg, _value(node)) for argument, node in pairs if node is not None]
    return [_value(node) for node in arguments.defaults], sorted(named)


def _value(node: ast.expr) -> Any:
    if isinstance(node, (ast.Call, ast.Dict, ast.List, ast.Set)):  # as `_plain` marks their values at run time
        return ...
    return ast.literal_eval(node)


def _syntax(node: Any) -> Any:
    if isinstance(node, list):
        documented = node and isinstance(node[0], ast.Expr) and isinstance(node[0].value, ast.Constant)
        return [_syntax(item) for item in (node[1:] if documented and type(node[0].value.value) is str else node)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, _syntax(value)) for name, value in ast.iter_fields(node) if name not in _UNSTABLE]
    return type(node).__name__, [(name, value) for name, value in fields if value not in ("None", [])]
