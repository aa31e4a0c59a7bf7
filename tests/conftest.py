"""Every test runs in an environment of its own: no settings of the user's, no profile of the machine's, stock hooks."""

import abc
import gc
import importlib.util
import itertools
import os
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; read when torch is imported
    for _library in ("OMP", "MKL"):
        os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
    # KeOps rewrites its list when a process ends; another that imports KeOps meanwhile reads an empty file
    _KEOPS = tempfile.TemporaryDirectory()
    os.environ["KEOPS_CACHE_FOLDER"] = _KEOPS.name

import gpytorch
import linear_operator
import psutil
import pytest
import torch
from support import thinned
from support.loads import quiet

import autokern
from autokern.core import registry
from autokern.core.op import Op
from autokern.core.problem import Features, Problem
from autokern.core.settings import Settings
from autokern.core.state import inside
from autokern.hooks import install
from autokern.kernels import tiles
from autokern.runtime import dispatch
from autokern.system import host
from autokern.tuning import chooser

registry.load()  # before a test module imports one by itself, which would leave its candidates without a source


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "also run the tortures of tests/torture, in minutes (ci) or in earnest (full)"
    parser.addoption("--torture", choices=("ci", "full"), help=told)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker takes seconds to start and a gigabyte: some for the whole, none for a file or what measures."""
    some = any(argument.partition("::")[0].endswith(".py") for argument in config.args)
    return 0 if some or config.getoption("--torture") else min(psutil.cpu_count() or 1, 4)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", thinned.TOLD)


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thinned.mark_the_rest(items)


def pytest_collection_finish() -> None:
    """What was imported and collected stays; no collection of garbage in between has to look at it."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    unwanted = collection_path.name == "torture" and config.getoption("--torture") is None
    return True if unwanted or (_NO_BOTORCH and _needs_botorch(collection_path)) else None


_NO_BOTORCH = importlib.util.find_spec("botorch") is None


def _needs_botorch(path: Path) -> bool:
    """Whether a test file imports BoTorch, of which Python 3.10 has no version that is served."""
    if path.name == "differential":
        return True
    return path.suffix == ".py" and re.search(r"^(from|import) botorch", path.read_text(), re.MULTILINE) is not None


def _bare(patch: pytest.MonkeyPatch, home: object) -> None:
    for name in list(os.environ):
        if name.startswith("AUTOKERN"):
            patch.delenv(name)
    patch.setenv("AUTOKERN_HOME", str(home))
    patch.setenv("AUTOKERN_CALIBRATE", "never")


@pytest.fixture(autouse=True, scope="session")
def _bare_environment(tmp_path_factory):
    """What fixtures of a wider scope than one test see."""
    with pytest.MonkeyPatch.context() as patch:
        _bare(patch, tmp_path_factory.mktemp("autokern"))
        yield


_NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def _isolated(request, tmp_path_factory, _bare_environment):
    """A fresh home and session before a test; the libraries' own functions after it, whatever it did."""
    known = "tmp_path" in request.fixturenames  # a folder that is made for every test costs more than most tests
    parent = request.getfixturevalue("tmp_path") if known else tmp_path_factory.getbasetemp() / f"{next(_NUMBERS)}"
    with pytest.MonkeyPatch.context() as patch:
        _bare(patch, parent / "autokern")
        quiet(patch)
        nothing = chooser.Shipped()  # stock runs where nothing is measured, unless a test says otherwise
        patch.setattr(chooser, "recorded", lambda: nothing)
        dispatch.reset()
        if keops := sys.modules.get("autokern.backends.keops_product"):
            keops._failure = ""
        yield
        while install._depth:
            install.disable()
        inside.active = False
    dispatch.reset(Settings(calibrate="never"))


@pytest.fixture(scope="session")
def in_earnest(pytestconfig):
    """Whether tests that may go on for hours do."""
    return pytestconfig.getoption("--torture") == "full"


@pytest.fixture
def make_op(monkeypatch):
    """A maker of ops that are gone after the test; unless told otherwise they double a matrix, without candidates."""
    monkeypatch.setattr(registry, "_ops", {op.name: op for op in registry.registered()})

    def make(name: str, **options: Any) -> Op:
        usual: dict[str, Any] = {
            "summary": "twice a matrix",
            "key": lambda a: (a.__class__, a.shape),
            "problem_of": lambda a: Problem(op=name, m=a.shape[0], n=a.shape[1]),
            "reference": lambda a: 2 * a,
            "sample": lambda problem, generator: (torch.ones(problem.m, problem.n, dtype=torch.float64),),
            "check": lambda problem, out, args: (out - 2 * args[0]).abs().max().item(),
            "grid": lambda level, dtype, device: [Problem(op=name, m=n, n=n, dtype=dtype) for n in (2, 4, 8)],
            "features": lambda problem: Features(flops=float(problem.m * problem.n)),
            "memory": lambda problem: 8 * problem.m * problem.n,
        }
        defined = {key: staticmethod(what) if callable(what) else what for key, what in {**usual, **options}.items()}
        return abc.ABCMeta(name, (Op,), {"name": name, "__module__": __name__, **defined})()

    return make


@pytest.fixture
def make_pair(make_op):
    """A maker of ops that double a matrix in two ways: `stock` and `other`."""

    def make(name: str, **options: Any) -> Op:
        op = make_op(name, **options)
        op.candidate("stock")(lambda a: 2 * a)
        op.candidate("other")(lambda a: a + a)
        return op

    return make


def _kinds() -> list[type]:
    held = {**vars(linear_operator.settings), **vars(gpytorch.settings)}
    return [kind for kind in held.values() if isinstance(kind, type)]


_NAMES = ("_default", "_global_value", "_state")
_DEFAULTS = [(kind, name, vars(kind).get(name)) for kind in _kinds() for name in _NAMES]
_OWN = {(kind, name) for kind, name, _ in _DEFAULTS if name in vars(kind)}


def _as_set_by_the_libraries() -> None:
    for kind, name, value in _DEFAULTS:
        if (kind, name) in _OWN:
            setattr(kind, name, value)
        elif name in vars(kind):  # a flag that was never set before
            delattr(kind, name)


@pytest.fixture(autouse=True)
def _environment_as_before():
    """What a test does to the variables of its process, processes of later tests do not inherit."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def _library_defaults():
    """No test sees what an import of BoTorch, or two threads inside of one flag of the libraries, has left behind."""
    _as_set_by_the_libraries()
    yield
    _as_set_by_the_libraries()


@pytest.fixture(scope="module")
def one_thread():
    """At the sizes of tests, threads only wait for each other, and long where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def enabled():
    with autokern.enabled():
        yield


@pytest.fixture
def free(monkeypatch):
    """The bytes that are free, to be changed at will, and how often somebody asked."""
    there = SimpleNamespace(bytes=4 * 2**30, asked=0)

    def look(device):
        there.asked += 1
        return there.bytes

    monkeypatch.setattr(host, "available_memory", look)
    return there


@pytest.fixture
def only_tiles(monkeypatch):
    """Products of kernel matrices by tiles of 16 points, of which some are not full, and in no other way."""
    cut = tiles.bounds
    monkeypatch.setattr(tiles, "bounds", lambda n, tile, multiple: cut(n, min(tile, 16), multiple))
    monkeypatch.setenv("AUTOKERN_FORCE", "kernel_matmul=tiled")
    dispatch.reset()


@pytest.fixture
def trusted(monkeypatch):
    """Functions of torch that a test replaces, to count calls, are taken for torch's own."""
    monkeypatch.setenv("AUTOKERN_UNKNOWN", "trust")
