"""Runs of the program on a changed library: forked from a process that has torch, and not the libraries, imported."""

import contextlib
import importlib
import importlib.abc
import importlib.util
import itertools
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from forks import ended, forked
from release_changes import Change
from release_sources import LIBRARIES, Function, Trace, functions, modules, traced

TOLERANCE = 1e-8
"""Of the largest entry, in float64: that of `tests/differential/compare.py`."""
HANGS = 900


class Died(NamedTuple):
    """What a process that gave no answer ended with."""

    status: int


def start(function: Callable[[], Any]) -> tuple[int, int]:
    """Fork a process that answers with what a function returns; return its number, and where its answer is read."""
    reading, writing = os.pipe()

    def answered() -> int:
        os.close(reading)
        signal.alarm(HANGS)
        with open(writing, "wb") as answer:
            answer.write(pickle.dumps(function()))
        return 0

    child = forked(answered)
    os.close(writing)
    return child, reading


def _answer(child: int, reading: int) -> Any:
    with open(reading, "rb") as answer:
        told = answer.read()
    status = ended(child)
    return Died(status) if status or not told else pickle.loads(told)


def in_fork(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a process of its own, or how that died."""
    return _answer(*start(function))


Job = tuple[Any, Callable[[], Any]]


def jobs(ready: Iterator[Job], done: Callable[[Any, Any], None], at_once: int) -> None:
    while some := list(itertools.islice(ready, at_once)):
        started = [(name, start(function)) for name, function in some]
        for name, begun in started:
            done(name, _answer(*begun))


def preload() -> None:
    """Import all that the libraries and the program import, without them."""

    def more() -> list[str]:
        before = set(sys.modules)
        import_libraries(True)
        from release_program import PARTS

        run_program(tuple(PARTS))  # an optimiser imports half of torch when it is first made
        own = (*LIBRARIES, "autokern", "release_program", "support_cases")
        return [name for name in sys.modules if name not in before and name.partition(".")[0] not in own]

    for name in in_fork(more):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert not set(LIBRARIES) & set(sys.modules)


def import_libraries(botorch: bool) -> None:
    import gpytorch  # noqa: F401

    if botorch:
        for name in ("acquisition", "fit", "models", "optim", "sampling"):
            importlib.import_module(f"botorch.{name}")


class _Changed(importlib.abc.MetaPathFinder):
    """Finds changed modules, in a folder of their own."""

    def __init__(self, change: Change, folder: Path) -> None:
        self.paths = dict[str, Path]()
        for module, source in (change.sources() if change.sources is not None else {}).items():
            self.paths[module] = folder / f"{module}.py"
            self.paths[module].write_text(source, encoding="utf-8")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.paths:
            return None
        here = modules().get(name)
        package = [str(here.parent)] if here is not None and here.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, self.paths[name], submodule_search_locations=package)


class Ran(NamedTuple):
    """What became of one part: what it noted, or what it raised."""

    facts: dict[str, torch.Tensor]
    raised: str


def run_program(parts: tuple[str, ...], amid: Callable[[], None] | None = None) -> dict[str, Ran]:
    """Run parts of the program, with a change between their phases."""
    from release_program import PARTS

    found = {}
    for name in parts:
        facts: dict[str, torch.Tensor] = {}

        def note(what: str, value: torch.Tensor, facts: dict[str, torch.Tensor] = facts) -> None:
            facts[what] = value.detach().clone()

        raised = ""
        torch.manual_seed(0)
        try:
            phases = PARTS[name](note)
            next(phases)
            if amid is not None:
                amid()
                amid = None
            for _ in phases:
                pass
        except Exception as error:
            raised = _told(error)
        found[name] = Ran(facts, raised)
    return found


def _told(error: BaseException) -> str:
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:160]} ({'/'.join(Path(at.filename).parts[-3:])}:{at.lineno})"


def gap(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str:
    """Return in words what differs most between what two runs noted; nothing if it is equal but for rounding."""
    if mine.keys() != theirs.keys():
        return f"only one of both has {sorted(mine.keys() ^ theirs.keys())[:3]}"
    worst, told = TOLERANCE, ""
    for name, value in theirs.items():
        own = mine[name]
        if own.shape != value.shape:
            return f"{name}: {tuple(own.shape)} where stock has {tuple(value.shape)}"
        if not torch.equal(own.isfinite(), value.isfinite()):
            return f"{name}: other entries are finite than stock's"
        finite = value.isfinite()
        size = max(value[finite].abs().max().item(), 1e-8) if bool(finite.any()) else 1.0
        off = (own - value)[finite].abs().max().item() / size if bool(finite.any()) else 0.0
        if off > worst:
            worst, told = off, f"{name} is off by {off:.2g}"
    return told


def _run(change: Change, parts: tuple[str, ...], auto: bool, orders: dict[str, str]) -> Any:
    """Run the program as stock or with autokern; return what went wrong, what became of each part, and warnings."""
    os.environ.update(orders)
    heard: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            make = None if change.prepare is None else change.prepare()
            then = make() if make is not None and change.when == "before" else None
        except Exception as error:
            return "cannot be made", _told(error), heard
        if auto:
            try:
                import autokern.auto  # noqa: F401
            except BaseException as error:
                return "import crashes", _told(error), heard
        if then is not None:
            then()
        try:
            if make is not None and change.when == "after":
                make()
            found = run_program(parts, make if change.when == "amid" else None)
        except Exception as error:
            return "call crashes", _told(error), heard
        heard = [str(one.message) for one in caught if one.category.__name__ == "AutokernWarning"]
    return "", found, heard


class Verdict(NamedTuple):
    """What became of a change."""

    word: str  # one of the columns of `releases`
    told: str = ""
    warned: str = ""  # the first warning of autokern's


def verdict(change: Change, known: dict[str, Ran], folder: Path, ways: tuple[dict[str, str], ...]) -> Verdict:
    """Make a change in this process, run the program as stock and with autokern, and compare."""
    sys.dont_write_bytecode = True
    warnings.simplefilter("ignore")
    finder = _Changed(change, folder)
    if change.sources is not None and not finder.paths:
        return Verdict("no effect", "there is nothing to change")
    sys.meta_path.insert(0, finder)
    of_botorch = any(part == "a bayesian loop" for part in change.parts)
    try:
        import_libraries(of_botorch and len(change.parts) == 1)
        import release_program  # noqa: F401
    except Exception as error:
        return Verdict("stock fails", _told(error))
    stock = in_fork(lambda: _run(change, change.parts, False, {}))
    if isinstance(stock, Died) or stock[0]:
        return Verdict("stock fails", str(stock[1:2]))
    parts = tuple(part for part in change.parts if not stock[1][part].raised)
    if not parts:
        return Verdict("stock fails", stock[1][change.parts[0]].raised)
    if change.effect and not any(gap(stock[1][part].facts, known[part].facts) for part in parts):
        return Verdict("no effect")
    warned = ""
    for orders in ways:
        # all parts, since a change while models live falls into the first of them
        found = in_fork(lambda orders=orders: _run(change, change.parts, True, orders))
        if isinstance(found, Died):
            return Verdict("call crashes", f"ended with {found.status}")
        warned = warned or next(iter(found[2]), "")
        if found[0]:
            return Verdict(found[0], found[1], warned)
        for part in parts:
            if found[1][part].raised:
                return Verdict("call crashes", f"{part}: {found[1][part].raised}", warned)
        for part in parts:
            told = gap(found[1][part].facts, stock[1][part].facts)
            if told and not any(not gap(found[1][part].facts, near) for near in _nearby(change, part)):
                return Verdict("silently wrong", f"{part}: {told}", warned)
    return Verdict("fine", "", warned)


def _nearby(change: Change, part: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what stock notes where data differ by rounding: the end of a search may depend on it."""
    for nudge in ("1e-13", "-1e-13", "1e-12"):
        # all parts, since a change while models live falls into the first of them
        ran = in_fork(lambda nudge=nudge: _run(change, change.parts, False, {"T14_NUDGE": nudge}))
        if not isinstance(ran, Died) and not ran[0]:
            yield ran[1][part].facts


def traces(auto: bool, orders: dict[str, str]) -> Iterator[tuple[str, Trace, float]]:
    """Yield part by part what it executes of the libraries, and how long it takes."""
    os.environ.update(orders)
    warnings.simplefilter("ignore")
    import_libraries(False)
    from release_program import PARTS

    if auto:
        import autokern.auto  # noqa: F401
    for name in PARTS:
        torch.manual_seed(0)
        began = time.perf_counter()
        ran = traced(lambda name=name: [None for _ in PARTS[name](lambda what, value: None)])
        yield name, ran, time.perf_counter() - began


def hooked() -> list[Function]:
    """Return the functions of the libraries that autokern's hooks take the place of."""
    from autokern.hooks import install

    found = []
    for patch in install.patches():
        module = getattr(patch.owner, "__module__", patch.owner.__name__)
        holder = getattr(patch.owner, "__qualname__", "")
        if module in modules():
            found += [one for one in functions(module).values() if (one.holder, one.name) == (holder, patch.name)]
    return found


def recorded() -> dict[str, dict[str, str]]:
    """Return what autokern knows of the libraries' functions, by module and qualified name."""
    from autokern.core.releases.recorded import table

    return dict(table()["code"])
