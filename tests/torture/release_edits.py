"""Edits of the libraries' sources, as a new release or a user would make them."""

import ast
import functools
import zlib
from collections.abc import Iterator
from typing import Any

from release_sources import Definition, Function, at, naming, tree

Sources = dict[str, str]
"""New text of modules, by dotted name."""

FACTOR = 1.5


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
    parsed = tree(module)
    dict(_assigned(parsed))[name].value = ast.Constant(constants(module)[name])
    return {module: ast.unparse(parsed)}


def _returning(node: Any, expression: str) -> bool:
    """Let a function return an expression of what it did, of `found`."""
    returns = [one for one in _body(node) if isinstance(one, ast.Return) and one.value is not None]
    for one in returns:
        call: Any = ast.parse(f"(lambda found: {expression})()", mode="eval").body
        call.args.append(one.value)
        one.value = call
    return bool(returns)


def scaled_tree(function: Function, returned: str) -> ast.Module | None:
    """Return the tree of a module, lines as they are, in which a function returns 1.5 times what it did."""
    parsed = tree(function.module)
    more = f"found * {FACTOR}" if returned == "one" else f"(found[0] * {FACTOR}, *found[1:])"
    return ast.fix_missing_locations(parsed) if _returning(at(function, parsed), more) else None


def scaled(function: Function, returned: str) -> Sources:
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
    found, calls = {}, 0
    for module in naming(function.name):
        parsed, touched = tree(module), False
        if module == function.module and factor is not None:
            _returning(at(function, parsed), "found if anew is None else found * anew")
        for node in ast.walk(parsed):
            if isinstance(node, Definition) and node.name == function.name:
                node.args.kwonlyargs.append(ast.arg("anew"))
                node.args.kw_defaults.append(ast.Constant(None))
                touched = True
            elif isinstance(node, ast.Call) and function.name in (
                getattr(node.func, "attr", ""), getattr(node.func, "id", ""),
            ):  # fmt: skip
                node.keywords.append(ast.keyword("anew", ast.Constant(factor)))
                calls, touched = calls + 1, True
        if touched:
            found[module] = ast.unparse(ast.fix_missing_locations(parsed))
    return found if calls else {}
