"""Changes that a new release of a library, or a user, may make: of every kind one for each function that matters."""

import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, MethodType
from typing import Any, NamedTuple

import release_edits as edits
from release_sources import LIBRARIES, Function, Ran, functions, modules, renamed

HERE = Path(__file__).parent
WHEN = ("before", "after", "amid")
"""When a patch is made: before autokern is imported, after it, and while models live."""


class Change(NamedTuple):
    """One change of the libraries, and the parts of the program that run what is changed.

    `sources` returns new text of modules, nothing where there is nothing to change, in the process of the change.
    `prepare` is called when the libraries are there and autokern is not, and returns the function that makes the
    change, one of `WHEN`; what that returns is called when autokern is there.
    """

    name: str
    parts: tuple[str, ...]
    sources: Callable[[], edits.Sources] | None = None
    prepare: Callable[[], Callable[[], Any]] | None = None
    when: str = "before"
    effect: bool = True  # whether it counts only where stock's numbers are others


class Known(NamedTuple):
    """What changes are made of."""

    ran: dict[str, dict[Function, Ran]]  # what stock executes in each part of the program
    hooked: list[Function]  # targets of autokern's hooks
    relied: set[Function]  # what stock executes more often than autokern does
    program: dict[str, float]  # seconds that each part takes

    def parts(self, function: Function) -> tuple[str, ...]:
        """Return the two shortest parts that execute a function, in their order."""
        found = [part for part in self.program if function in self.ran[part]]
        short = sorted(found, key=self.program.__getitem__)[:2]
        return tuple(part for part in self.program if part in short)

    def returned(self, function: Function) -> str:
        return next((ran[function].returned for ran in self.ran.values() if function in ran), "")

    def ordered(self, kind: str) -> list[Function]:
        """Return all functions in an order of their own for each kind, those that matter most first."""
        every = set(self.hooked).union(*self.ran.values())
        first = self.relied | set(self.hooked)
        return sorted(every, key=lambda one: (edits.chance(kind, one) / 2**32 + 0.8 * (one not in first), one))

    def numeric(self, kind: str) -> Iterator[tuple[Function, str]]:
        """Yield those that return numbers, and which."""
        for function in self.ordered(kind):
            if not function.name.endswith("__init__") and (returned := self.returned(function)):
                yield function, returned


def returned(known: Known) -> Iterator[Change]:
    for function, what in known.numeric("returned"):
        yield Change(function.qualified, known.parts(function), functools.partial(edits.scaled, function, what))


def patched(when: str, known: Known) -> Iterator[Change]:
    for function, _ in known.numeric(f"patched {when}"):
        if not function.nested:
            way = ("wraps", "plain", "everywhere", "object")[edits.chance("way", when, function) % 4]
            prepare = functools.partial(_patch_of, function, way)
            yield Change(f"{function.qualified} ({way})", known.parts(function), prepare=prepare, when=when)


def of_torch(known: Known) -> Iterator[Change]:
    """Functions of torch, in C and in Python, that a user replaces."""
    for place, name, when in sorted(
        ((*one, when) for one in TORCH for when in WHEN), key=lambda one: edits.chance(*one)
    ):
        way = ("wraps", "plain")[edits.chance("way", name, when) % 2]
        prepare = functools.partial(_patch, place, name, way)
        yield Change(f"{place}.{name} ({when}, {way})", tuple(known.program), prepare=prepare, when=when)


TORCH = (
    ("torch.nn.Softplus", "forward"), ("torch.distributions.Normal", "log_prob"),
    ("torch.distributions.Gamma", "log_prob"), ("torch.nn.functional", "softplus"),
    ("torch.linalg", "cholesky_ex"), ("torch.linalg", "solve_triangular"), ("torch.linalg", "qr"),
    ("torch.linalg", "eigh"), ("torch", "cdist"), ("torch", "cholesky_solve"), ("torch", "matmul"), ("torch", "exp"),
    ("torch.Tensor", "exp"), ("torch.Tensor", "matmul"), ("torch.Tensor", "clamp_min_"), ("torch.Tensor", "sum"),
)  # fmt: skip
"""Functions of torch that the libraries compute with, and users patch."""


def _patch_of(function: Function, way: str) -> Callable[[], None]:
    return _patch(".".join(filter(None, (function.module, function.holder))), function.name, way)


def _patch(place: str, name: str, way: str) -> Callable[[], None]:
    """Return the function that puts a user's own function in the place of one."""
    owner = _object(place)

    def put() -> None:
        raw = vars(owner)[name] if name in vars(owner) else getattr(owner, name)  # a tensor inherits its methods
        new = _patched(raw, way)
        setattr(owner, name, new)
        for module in list(sys.modules.values()) if way == "everywhere" and inspect.ismodule(owner) else ():
            if getattr(module, "__name__", "").partition(".")[0] in LIBRARIES and vars(module).get(name) is raw:
                setattr(module, name, new)

    return put


def _object(place: str) -> Any:
    """Return a module or a class by its dotted name; a module may be hidden behind a function of its name."""
    parts = place.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[cut:], sys.modules[".".join(parts[:cut])])
    raise LookupError(place)


class _Object:
    """A decorator that is an object, and says what it decorates."""

    def __init__(self, function: Callable[..., Any], mine: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.mine = mine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.mine(*args, **kwargs)

    def __get__(self, one: Any, kind: Any = None) -> Any:
        return self if one is None else MethodType(self, one)


class _Property(property):
    """A property of a class of the user's, around the function of the library's own."""

    def __get__(self, one: Any, kind: Any = None) -> Any:
        return self if one is None else _grown(super().__get__(one, kind))


def _grown(found: Any) -> Any:
    return (found[0] * edits.FACTOR, *found[1:]) if isinstance(found, tuple) else found * edits.FACTOR


def _patched(raw: Any, way: str) -> Any:
    if isinstance(raw, (staticmethod, classmethod)):
        return type(raw)(_patched(raw.__func__, way))
    if hasattr(raw, "fget"):
        of, get = (_Property, raw.fget) if way == "object" else (property, _patched(raw.fget, way))
        return of(get, raw.fset, raw.fdel)

    def mine(*args: Any, **kwargs: Any) -> Any:
        return _grown(raw(*args, **kwargs))

    around = {"wraps": functools.wraps(raw), "object": functools.partial(_Object, raw)}
    return around.get(way, lambda function: function)(mine)


def overridden(known: Known) -> Iterator[Change]:
    """Functions that a class inherits, and a user gives it anew."""
    for function, _ in known.numeric("overridden"):
        if not function.holder or function.nested or function.name.startswith("__"):
            continue
        for heir in edits.heirs(function):
            when = WHEN[edits.chance("when", function, heir) % 3]
            prepare = functools.partial(_override, heir, function)
            yield Change(f"{function.qualified} in {heir} ({when})", known.parts(function), prepare=prepare, when=when)


def _override(heir: str, function: Function) -> Callable[[], None]:
    raw = vars(_object(f"{function.module}.{function.holder}"))[function.name]
    return functools.partial(setattr, _object(heir), function.name, _patched(raw, "plain"))


def constant(known: Known) -> Iterator[Change]:
    """Constants of modules and classes by turns in the source, and as a user sets them."""
    near = {(one.module, one.holder): one for one in reversed(known.ordered("constant")) if known.parts(one)}
    found = [(module, name) for module in sorted({module for module, _ in near}) for name in edits.constants(module)]
    for module, name in sorted(found, key=lambda one: edits.chance("constant", one)):
        holder, last = name.rpartition(".")[::2]
        parts = known.parts(near.get((module, holder)) or next(one for (of, _), one in near.items() if of == module))
        yield Change(f"{module}.{name}", parts, functools.partial(edits.revalued, module, name))
        for when in WHEN:
            prepare = functools.partial(_set, f"{module}.{holder}".strip("."), last, edits.constants(module)[name])
            yield Change(f"{module}.{name} ({when})", parts, prepare=prepare, when=when)


def _set(place: str, name: str, value: Any) -> Callable[[], None]:
    return functools.partial(setattr, _object(place), name, value)


def in_place(known: Known) -> Iterator[Change]:
    for function, what in known.numeric("code"):
        when = WHEN[edits.chance("when", function) % 3]
        prepare = functools.partial(_recode, function, what)
        yield Change(f"{function.qualified} ({when})", known.parts(function), prepare=prepare, when=when)


def _recode(function: Function, what: str) -> Callable[[], None]:
    """Return the function that gives a function of the libraries other code, as autoreload does."""
    parsed = edits.scaled_tree(function, what)
    if parsed is None:
        raise LookupError("it returns nothing")
    codes = _codes(compile(parsed, str(modules()[function.module]), "exec", dont_inherit=True))
    new = next(one for one in codes if (one.co_name, one.co_firstlineno) == (function.name, function.line))
    raw = vars(_object(".".join(filter(None, (function.module, function.holder)))))[function.name]
    raw = getattr(raw, "fget", None) or getattr(raw, "__func__", raw)
    while raw.__code__.co_firstlineno != function.line:
        raw = raw.__wrapped__
    return functools.partial(setattr, raw, "__code__", new)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def new_name(known: Known) -> Iterator[Change]:
    done = _words() | _of_torch()
    for function in known.ordered("renamed"):
        for name in (function.name, *function.holder.split(".")[-1:]):
            if name and name not in done and not name.startswith(("__", "<")):
                done.add(name)
                some = known.parts(function) or _USUAL
                sources = functools.partial(renamed, name, f"{name}_renamed")
                yield Change(name, some, sources, effect=False)


_USUAL = ("training with priors", "fixed noise")


@functools.cache
def _program() -> str:
    files = HERE / "release_program.py", HERE.parents[1] / "calibration" / "support_cases.py"
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@functools.cache
def _words() -> set[str]:
    """The words that the program uses: names that a release would keep, or the program would be at fault."""
    return set(re.findall(r"\w+", _program()))


@functools.cache
def _of_torch() -> set[str]:
    """Names of torch's own, which are not the libraries' to rename."""
    import builtins

    import torch

    own = (torch, torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.autograd.Function, torch.autograd.function,
           torch.distributions.Distribution, torch.linalg, torch.optim.Optimizer, torch.Size, builtins)  # fmt: skip
    return {name for one in own for name in dir(one)} | {"ctx", "backward", "forward"}


def to_a_base(known: Known) -> Iterator[Change]:
    for function in known.ordered("moved"):
        if function.holder and not function.nested:
            sources = functools.partial(edits.moved, function)
            yield Change(function.qualified, known.parts(function) or _USUAL, sources, effect=False)


def new_keyword(known: Known) -> Iterator[Change]:
    done = _of_torch()
    for function in known.ordered("keyword"):
        if function.name in done or function.nested or function.name.startswith("__"):
            continue
        done.add(function.name)
        factor = edits.FACTOR if known.returned(function) == "one" and edits.chance("factor", function) % 2 else None
        told = f"{function.qualified} ({'an effect' if factor else 'none'})"
        sources = functools.partial(edits.grown, function, factor)
        yield Change(told, known.parts(function) or _USUAL, sources, effect=factor is not None)


def gone(known: Known) -> Iterator[Change]:
    """Modules of the libraries by turns with private and other names of torch."""
    for pair in zip(_modules_gone(known), _names_gone(known), strict=False):
        yield from pair


def _modules_gone(known: Known) -> Iterator[Change]:
    named = set(re.findall(r"(?:linear_operator|gpytorch|botorch)(?:\.\w+)+", _autokern()))
    named |= {one.module for one in [*known.hooked, *known.relied]}
    program = _program()
    for module in sorted(named & modules().keys(), key=lambda one: edits.chance("gone", one)):
        if modules()[module].name != "__init__.py" and module not in program:
            parts = next((known.parts(one) for one in functions(module).values() if known.parts(one)), _USUAL)
            prepare = functools.partial(functools.partial, _move, module)
            yield Change(module, parts, prepare=prepare, effect=False)


def _move(module: str) -> Callable[[], None]:
    """Give a module another name; return what brings the old one back for what the libraries import later."""
    found, (parent, _, name) = importlib.import_module(module), module.rpartition(".")
    sys.modules[f"{module}_moved"], sys.modules[module] = found, None  # type: ignore[assignment]  # no import finds it
    for one in [found, *vars(found).values()]:
        if getattr(one, "__module__", "") == module:
            one.__module__ = f"{module}_moved"
    found.__name__ = f"{module}_moved"
    if vars(sys.modules[parent]).get(name) is found:
        delattr(sys.modules[parent], name)
    return functools.partial(sys.modules.__setitem__, module, found)


@functools.cache
def _autokern() -> str:
    package = importlib.util.find_spec("autokern")
    assert package is not None
    places = package.submodule_search_locations or []
    return "\n".join(p.read_text(encoding="utf-8") for place in places for p in sorted(Path(place).rglob("*.py")))


def _names_gone(known: Known) -> Iterator[Change]:
    chains = set()
    for node in ast.walk(ast.parse(_autokern().replace("from __future__", "from x"))):
        if isinstance(node, ast.Attribute):
            chains.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            chains |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = sorted(one for one in chains if re.fullmatch(r"torch(\.\w+)+", one) and not one.startswith("torch.Tensor"))
    for name in sorted(ours, key=lambda one: ("._" not in one, edits.chance("gone", one))):
        yield Change(name, _USUAL, prepare=functools.partial(_delete, name), effect=False)


def _delete(name: str) -> Callable[[], None]:
    place, _, last = name.rpartition(".")
    return functools.partial(delattr, _object(place), last)


KINDS: dict[str, Callable[[Known], Iterator[Change]]] = {
    "return value times 1.5": returned,
    "patched before autokern": functools.partial(patched, "before"),
    "patched after it": functools.partial(patched, "after"),
    "patched while models live": functools.partial(patched, "amid"),
    "overridden in a class": overridden,
    "code replaced in place": in_place,
    "function of torch replaced": of_torch,
    "constant changed": constant,
    "renamed": new_name,
    "moved to a base class": to_a_base,
    "module or torch name gone": gone,
    "a new keyword that the library passes": new_keyword,
}
"""Kinds of change, each with what yields its changes."""
