"""Edits of the libraries' sources, as a new release or a user would make them."""

from __future__ import annotations

import ast
import functools
import re
import zlib
from collections.abc import Iterator
from typing import Any

from release_sources import Definition, Function, at, modules, naming, rewritten, tree

Sources = dict[str, str]
"""New text of modules, by dotted name."""

FACTOR = 1.5
_SWAPPED: dict[type[ast.operator], type[ast.operator]] = {ast.Mult: ast.Div, ast.Div: ast.Mult}
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_METHODS = {"mul": "div", "div": "mul", "exp": "exp2", "sqrt": "square", "sin": "cos", "log": "log1p"}
_SIZES = re.compile(r"shape|size|dim|len\(|num_|batch|index|\[[^]]*\] [+*]|['\"]")
"""What tells that a sum or product is one of sizes, or of sequences."""


def chance(*words: object) -> int:
    """Return a number that is the same in every run."""
    return zlib.crc32(" ".join(map(str, words)).encode())


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body, without those of functions in it and of texts for errors."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*Definition.__args__, ast.Lambda, ast.Raise, ast.Assert, ast.JoinedStr)):
            yield child
            yield from _own(child)


def _body(node: Any) -> Iterator[ast.AST]:
    return _own(ast.Module(body=node.body, type_ignores=[]))


_parsed = functools.cache(tree)


def computes(function: Function) -> bool:
    """Whether `edited` finds something to change."""
    return next(_sites(at(function, _parsed(function.module))), None) is not None


def edited(function: Function) -> Sources:
    """Change an operator, a constant or an elementary function in a body, if it has one."""
    parsed = tree(function.module)
    sites = list(_sites(at(function, parsed)))
    if not sites:
        return {}
    node = sites[chance("site", function.qualified) % len(sites)]
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
        node.op = _SWAPPED[type(node.op)]()
    elif isinstance(node, ast.BinOp):
        node.right = ast.BinOp(node.right, ast.Mult(), ast.Constant(FACTOR))
    elif isinstance(node, ast.Constant):
        node.value *= FACTOR
    else:
        node.func.attr = _METHODS[node.func.attr]
    return {function.module: ast.unparse(parsed)}


def _sites(node: Any) -> Iterator[Any]:
    for child in _body(node):
        if isinstance(child, ast.BinOp):
            found = isinstance(child.op, _OPERATORS) and not _SIZES.search(ast.unparse(child))
        elif isinstance(child, ast.Constant):
            found = type(child.value) is float and abs(child.value) > 1e-3
        else:
            found = isinstance(child, ast.Call) and getattr(child.func, "attr", "") in _METHODS
        if found:
            yield child


def _assigned(holder: Any, prefix: str = "") -> Iterator[tuple[str, ast.Assign | ast.AnnAssign]]:
    """Yield the names of a module and its classes that are given a number or a truth value."""
    for node in holder.body:
        if isinstance(node, ast.ClassDef):
            yield from _assigned(node, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and type(node.value.value) in (bool, int, float):
                yield f"{prefix}{target.id}", node


@functools.cache
def constants(module: str) -> dict[str, Any]:
    """Return other values of the constants of a module and its classes, by qualified name."""
    found = {name: node.value.value for name, node in _assigned(_parsed(module))}  # type: ignore[union-attr]
    others = {name: not value if type(value) is bool else value * FACTOR + 1 for name, value in found.items()}
    return {name: value for name, value in others.items() if not name.startswith("SCIPY_")}  # another optimiser


def revalued(module: str, name: str) -> Sources:
    """Give a constant another value."""
    parsed = tree(module)
    dict(_assigned(parsed))[name].value = ast.Constant(constants(module)[name])
    return {module: ast.unparse(parsed)}


def _scaled(parsed: ast.Module, function: Function, returned: str) -> bool:
    found = False
    for child in _body(at(function, parsed)):
        if isinstance(child, ast.Return) and child.value is not None:
            child.value, found = _more(child.value, returned), True
    return found


def _more(value: ast.expr, returned: str) -> ast.expr:
    if returned == "one":
        return ast.BinOp(value, ast.Mult(), ast.Constant(FACTOR))
    more = ast.parse(f"(lambda found: (found[0] * {FACTOR}, *found[1:]))()", mode="eval").body
    assert isinstance(more, ast.Call)
    more.args.append(value)
    return more


def scaled_tree(function: Function, returned: str) -> ast.Module | None:
    """Return the tree of a module, lines as they are, in which a function returns 1.5 times what it did."""
    parsed = tree(function.module)
    return ast.fix_missing_locations(parsed) if _scaled(parsed, function, returned) else None


def scaled(function: Function, returned: str) -> Sources:
    """Let a function return 1.5 times what it did."""
    parsed = scaled_tree(function, returned)
    return {} if parsed is None else {function.module: ast.unparse(parsed)}


def heirs(function: Function) -> list[str]:
    """Return the classes that are derived from that of a method and inherit the method."""
    found = []
    for module in naming(function.holder):
        for node in _parsed(module).body:
            derived = isinstance(node, ast.ClassDef) and any(
                getattr(one, "id", "") == function.holder for one in node.bases
            )
            if derived and all(getattr(one, "name", "") != function.name for one in node.body):
                found.append(f"{module}.{node.name}")
    return found


def moved(function: Function) -> Sources:
    """Move a method, with its setter if it is a property, to a new base of its class."""
    parsed = tree(function.module)
    for place, node in enumerate(parsed.body):
        if isinstance(node, ast.ClassDef) and node.name == function.holder:
            methods = [one for one in node.body if isinstance(one, Definition) and one.name == function.name]
            base = f"_Moved{node.name}"
            kept: list[ast.stmt] = [one for one in node.body if one not in methods]
            new = ast.parse(f"class {base}: pass").body[0]
            assert isinstance(new, ast.ClassDef)
            new.bases, new.keywords, new.body = node.bases, node.keywords, list(methods)
            node.bases, node.keywords, node.body = [ast.Name(base)], [], kept or [ast.Pass()]
            parsed.body.insert(place, new)
            return {function.module: ast.unparse(ast.fix_missing_locations(parsed))}
    return {}


def grown(function: Function, factor: float | None) -> Sources:
    """Give a function, and all of its name, a new keyword that all calls in the libraries pass.

    With a factor the function multiplies by it; without one the keyword has no effect.
    """
    passed = ast.Constant(factor)
    calls = 0

    def change(parsed: ast.Module, target: Any) -> bool:
        nonlocal calls
        found = False
        for node in ast.walk(parsed):
            if isinstance(node, Definition) and node.name == function.name:
                node.args.kwonlyargs.append(ast.arg("anew"))
                node.args.kw_defaults.append(ast.Constant(None))
                found = True
            elif isinstance(node, ast.Call) and function.name in (
                getattr(node.func, "attr", ""), getattr(node.func, "id", ""),
            ):  # fmt: skip
                node.keywords.append(ast.keyword("anew", passed))
                calls += 1
                found = True
        if target is not None and factor is not None:
            for child in _body(target):
                if isinstance(child, ast.Return) and child.value is not None:
                    more = ast.parse("(lambda found: found if anew is None else found * anew)()", mode="eval").body
                    more.args.append(child.value)  # type: ignore[attr-defined]
                    child.value = more
        return found

    found = {}
    for module in naming(function.name):
        parsed = tree(module)
        target = at(function, parsed) if module == function.module else None
        if change(parsed, target):
            found[module] = ast.unparse(ast.fix_missing_locations(parsed))
    return found if calls else {}


@functools.cache
def _package(module: str) -> str:
    return module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]


def renamed_module(module: str) -> Sources:
    """Give a module another name, in all imports of the libraries too."""
    parent, _, name = module.rpartition(".")
    new = f"{name}_moved"

    def change(parsed: ast.Module, where: str) -> bool:
        found = False
        for node in ast.walk(parsed):
            if isinstance(node, ast.ImportFrom):
                above = _package(where).split(".")
                base = ".".join(above[: len(above) - node.level + 1]) if node.level else ""
                absolute = ".".join(filter(None, (base, node.module)))
                if absolute == module:
                    node.module, node.level, found = f"{parent}.{new}", 0, True
                elif absolute == parent:
                    for alias in node.names:
                        if alias.name == name:
                            alias.name, alias.asname, found = new, alias.asname or name, True
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name == module and alias.asname:
                        alias.name, found = f"{parent}.{new}", True
        return found

    found: Sources = {}
    for one in naming(name):
        found |= rewritten(lambda parsed, one=one: change(parsed, one), (one,))  # type: ignore[misc]
    found[f"{parent}.{new}"] = found.pop(module, ast.unparse(tree(module)))
    return found
