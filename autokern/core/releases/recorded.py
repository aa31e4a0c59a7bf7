"""Fingerprints of functions, classes and constants, and whether the table of recorded releases has them.

A fingerprint is a hash of code, syntax, bases or a value, without docstrings. `calibration/record_release.py` executes
this file alone, in interpreters without the libraries.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType
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
    named = [(name, _plain(value)) for name, value in sorted((function.__kwdefaults__ or {}).items())]
    return _with(code, (list(map(_plain, function.__defaults__ or ())), named)), f"~{code}"


def _plain(value: Any) -> Any:
    """Return a literal, or a tuple of literals, as it is; ``...`` in place of any other value."""
    if type(value) is tuple:
        return tuple(_plain(item) for item in value)
    return value if type(value) in _SIMPLE else ...


def definitions(source: str, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield each definition of a source: its qualified name, the fingerprint of its code, and that of its syntax.

    The former begins with ``~`` without defaults, whose values are known only at run time. For classes and constants,
    both are those of the value. A decorated function is yielded again for each wrapper, with ``@1``, ``@2``, ...
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
            name = getattr(node.targets[0] if isinstance(node, ast.Assign) else node.target, "id", "")
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

    def value(node: ast.expr) -> Any:  # with ``...`` for those that `_plain` marks so at run time
        return ... if isinstance(node, (ast.Call, ast.Dict, ast.List, ast.Set)) else ast.literal_eval(node)

    named = sorted((argument.arg, value(node)) for argument, node in pairs if node is not None)
    return list(map(value, arguments.defaults)), named


def _syntax(node: Any) -> Any:
    if isinstance(node, list):
        documented = node and isinstance(node[0], ast.Expr) and isinstance(node[0].value, ast.Constant)
        return [_syntax(item) for item in (node[1:] if documented and type(node[0].value.value) is str else node)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, _syntax(value)) for name, value in ast.iter_fields(node) if name not in _UNSTABLE]
    return type(node).__name__, [(name, value) for name, value in fields if value not in ("None", [])]


_HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "")
"""The folder of the package, with the separator at its end."""
_INNER = ("fget", "fset", "fdel", "__func__", "__wrapped__", "wrapped", "func")
"""Attributes in which properties and other decorators keep the decorated function."""
BUILT_IN = (BuiltinFunctionType, MethodDescriptorType)
_DEEP = 6  # layers of decorators that are searched for functions
_CONTEXT = contextlib.contextmanager(iter).__code__  # of the wrapper around every function of a context manager
_DESCRIPTORS = (property, staticmethod, classmethod)  # descriptors that only return their function, like those of torch


@functools.cache
def table() -> dict[str, Any]:
    """Return the recorded releases by library, and the fingerprints by module and qualified name."""
    with open(os.path.join(os.path.dirname(__file__), "known.json"), encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


@functools.cache
def _wrappers() -> frozenset[str]:
    """Return the fingerprints of all nested functions: the libraries' decorators return these."""
    return frozenset(table()["within"].split())


@functools.lru_cache(8)
def _sources(path: str) -> list[tuple[str, str, str]]:
    from autokern.core.errors import suppressed

    with suppressed(OSError, SyntaxError, ValueError), open(path, encoding="utf-8") as file:
        return list(definitions(file.read(), path))
    return []


def is_ours(found: Any) -> bool:
    """Whether a function or property is code of autokern."""
    return getattr(getattr(getattr(found, "fget", found), "__code__", None), "co_filename", "").startswith(_HERE)


def original(found: Any) -> Any:
    """Return the original behind a hook of autokern; anything else as it is."""
    while hasattr(found, "__wrapped__") and is_ours(found):
        found = found.__wrapped__
    return found


def is_of(library: str, found: Any) -> bool:
    """Whether an attribute is C code, or all its functions were defined by a library or autokern."""
    names = [f.__globals__.get("__name__", "").partition(".")[0] for f in functions(found)]
    return {library, "autokern"}.issuperset(names) if names else isinstance(found, BUILT_IN)


def is_recorded(module: str, name: str, found: Any) -> bool:
    """Whether an attribute is recorded under its qualified name; of torch, whether it is torch's own function."""
    last = name.rpartition(".")[2]
    if module.partition(".")[0] == "torch" and isinstance(found, BUILT_IN):
        return found.__name__.endswith(last)
    code = table()["code"]
    marks = code.get(module, {}).get(name)
    if marks is None:  # a module may re-export another one's definition
        home, defined = getattr(found, "__module__", ""), getattr(found, "__qualname__", "")
        marks = code.get(home, {}).get(defined) if defined.rpartition(".")[2] == last else None
    if marks is None and (value := of_value(found)):  # a constant does not name its module
        marks = " ".join(space[name] for space in code.values() if name in space and value in space[name])
    if marks is not None:
        return _matches(found, frozenset(marks.split()))
    theirs = module.partition(".")[0] == "torch" and is_of("torch", found)
    return module.partition(".")[0] == "autokern" or (theirs and getattr(found, "__name__", "").endswith(last))


def _is_marked(function: FunctionType, marks: frozenset[str]) -> bool:
    """Whether a function has one of these fingerprints; on an unrecorded version of Python, by its syntax."""
    ours, path, name = of_function(function), function.__code__.co_filename, function.__code__.co_name
    if not marks.isdisjoint(ours) or is_ours(function):  # `ours`: enabling autokern replaced its code
        return True
    written = _sources(path) if path == function.__globals__.get("__file__") else ()
    return any(code in ours and syntax in marks and at.endswith(name) for at, code, syntax in written)


def _matches(found: Any, marks: frozenset[str], depth: int = 0) -> bool:
    """Whether the marks hold an attribute's constant value, or its innermost function within recorded decorators."""
    if not isinstance(found, FunctionType):
        layers = _layers(found)
        plain = type(found) in _DESCRIPTORS or type(found).__module__.startswith("torch.")
        return plain and all(_matches(one, marks) for one in layers) if layers else of_value(found) in marks
    if "__wrapped__" not in found.__dict__ and _is_marked(found, marks):
        return True
    depth += not is_ours(found)
    if depth and f"@{depth}" not in marks:  # more decorators than in any release
        return False
    wrapped = any(_matches(layer, marks, depth) for layer in _held(found))
    return wrapped and (found.__code__ is _CONTEXT or _is_marked(found, _wrappers()))


def _layers(found: Any) -> list[Any]:
    own = () if isinstance(found, type) else getattr(found, "__dict__", ())
    there = (name for name in _INNER if name in own or (hasattr(type(found), name) and not isinstance(found, type)))
    return [layer for name in there if (layer := getattr(found, name, None)) is not None]


def _held(function: FunctionType) -> list[Any]:
    """Return the functions that a function wraps: its ``__wrapped__``, or else the functions in its closure."""
    if "__wrapped__" in function.__dict__:
        return [function.__dict__["__wrapped__"]]
    return [one for one in map(content, function.__closure__ or ()) if isinstance(one, FunctionType)]


def content(cell: Any) -> Any:
    """Return the content of a closure's cell, None while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def functions(found: Any, depth: int = 0) -> Iterator[FunctionType]:
    """Yield the functions of an attribute, including autokern's hooks and their originals."""
    if isinstance(found, FunctionType):
        yield found
    layers = _held(found) if isinstance(found, FunctionType) else _layers(found)
    for layer in layers if depth < _DEEP else ():
        yield from functions(layer, depth + 1)


def is_within(function: FunctionType) -> bool:
    """Whether the code of a function is recorded, under the function's name or for any nested function."""
    marks = table()["code"].get(function.__module__, {}).get(function.__qualname__, "").split()
    return not _wrappers().union(marks).isdisjoint(of_function(function))
