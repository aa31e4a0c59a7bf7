"""Adding an op, a family of covariances or a hook is one file: a package that adds one of each is found everywhere."""

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
import torch
from support.fakes import install_entry_points
from typer.testing import CliRunner

import autokern
from autokern.cli.commands import app
from autokern.core import registry
from autokern.core.problem import Problem
from autokern.core.registry import get, registered
from autokern.hooks import install
from autokern.kernels import families
from autokern.kernels import family as family_of_name
from autokern.tuning.measuring import trial

family_module = sys.modules[family_of_name.__module__]

GUIDE = Path(__file__).parents[2] / "docs" / "add-a-candidate.md"
OP = GUIDE.read_text().partition("# autokern/ops/gram.py\n")[2].partition("```")[0]
FAMILY = GUIDE.read_text().partition("# autokern/kernels/cauchy.py\n")[2].partition("```")[0]
LIBRARY = "def gram(a):\n    '''What a library computes.'''\n    return a.mT @ a\n"
HOOK = """
from autokern.hooks.install import hook
from autokern.runtime.dispatch import route
from outer import library
from outer.op import GRAM

_dispatch = route(GRAM)


@hook(library, "gram")
def gram(a):
    return _dispatch(a)
"""
PROBLEM = Problem(op="gram", m=60, n=60)


@pytest.fixture
def outer(monkeypatch, tmp_path):
    """The package `outer`: an op, a family and a hook, found by entry points; nothing of it is left after the test."""
    with autokern.enabled():
        pass  # our own hooks are declared when they are first installed: what is put back later holds them
    monkeypatch.setattr(registry, "_ops", {op.name: op for op in registry.registered()})
    monkeypatch.setattr(family_module, "_FAMILIES", dict(family_module._FAMILIES))
    monkeypatch.setattr(family_module, "_OF_KERNEL", dict(family_module._OF_KERNEL))
    monkeypatch.setattr(install, "_hooks", dict(install._hooks))
    folder = tmp_path / "outer"
    folder.mkdir()
    for name, text in {"__init__": "", "op": OP, "cauchy": FAMILY, "library": LIBRARY, "hooks": HOOK}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    install_entry_points(monkeypatch, {f"outer:{name}": f"outer.{name}" for name in ("op", "cauchy", "hooks")})
    registry.load()
    assert {plugin.source: plugin.failure for plugin in registry.plugins()} == {
        f"outer:{name}": "" for name in ("op", "cauchy", "hooks")
    }
    yield importlib.import_module("outer")
    while install.is_enabled():
        install.disable()
    for name in [name for name in sys.modules if name.partition(".")[0] == "outer"]:
        del sys.modules[name]


def check(op, problem):
    """Hold the candidates that serve a problem against the contract, as the sweep of tests/ops does; none compiles."""
    args = op.sample(problem, torch.Generator().manual_seed(7))
    assert op.problem_of(*args) == problem
    able = [c for c in op.feasible(problem) if c.accuracy != "approximate" and not c.compiles]
    assert len(able) > 1
    for candidate in able:
        assert op.check(problem, trial(op, candidate.run, problem, args)().out, args) <= 1, candidate.name


def test_an_op_is_one_file(outer):
    op = get("gram")
    assert op in registered()
    assert op["rows"].source.startswith("outer:")
    problem = op.grid("quick", "float64", "cpu")[1]
    assert problem == PROBLEM
    for problem in (PROBLEM, PROBLEM.replace(grad="a")):
        check(op, problem)
    found = autokern.calibrate(["gram"], budget=1.0, progress=False)
    assert {name for trial in found.trials for name in trial.timings} == {"stock", "rows"}
    run = CliRunner().invoke
    shown = json.loads(run(app, ["show", "gram", "--json"]).stdout)
    assert {winner["candidate"] for winner in shown["winners"]} <= {"stock", "rows"}
    assert "stock" in run(app, ["show", "gram"]).output
    explained = run(app, ["explain", "gram", "--m", "500", "--n", "20"]).output
    assert "too many rows" in explained


def test_a_family_is_one_file(outer):
    assert "cauchy" in {family.name for family in families()}
    kernel = sys.modules["outer.cauchy"].CauchyKernel()
    assert family_module.formula_of(kernel).name == "cauchy"
    for op, sizes in (("kernel_matmul", {"rhs": 3, "variant": "cauchy+rbf/same"}), ("exact_log_prob", {})):
        usual = {"m": 40, "n": 40, "d": 2, "variant": "cauchy/cholesky", "grad": "theta"}
        problem = Problem(op=op, **{**usual, **sizes})
        check(get(op), problem)
        assert autokern.explain(op, **{**usual, **sizes}).candidate in get(op).names()


def test_a_hook_is_one_file(outer):
    library, a = sys.modules["outer.library"], torch.randn(8, 3)
    stock = library.gram
    with autokern.enabled():
        assert library.gram is sys.modules["outer.hooks"].gram
        assert library.gram.__wrapped__ is stock
        assert library.gram.__doc__ == "What a library computes."
        with autokern.using(force={"gram": "rows"}):
            torch.testing.assert_close(library.gram(a), stock(a))
            assert "rows" in str(autokern.stats())
    assert library.gram is stock
