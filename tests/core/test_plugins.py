"""Plugins: candidates by entry points, what becomes of those that fail, and what doctor says of them."""

import importlib.metadata
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.fakes import install_entry_points
from support.programs import said

import autokern
from autokern.cli import doctor
from autokern.cli.doctor import Finding
from autokern.core import registry
from autokern.core.errors import AutokernError, AutokernWarning
from autokern.core.problem import Problem
from autokern.core.registry import get, registered
from autokern.runtime import dispatch

DOCS = Path(__file__).parents[2] / "docs"
GOOD = """
import autokern
def register():
    @autokern.op("qr").candidate("theirs", unsupported=lambda p: None if p.n > 3 else "too small")
    def theirs(a):
        '''Theirs.'''
        import torch
        return torch.linalg.qr(a)
"""
OTHERS = "from autokern.core.registry import get\nget('fantasy').candidate('others')(lambda a: a)"
HALF = GOOD + "    autokern.op('fantasy').candidate('half')(lambda a: a)\n    {}\n"


@pytest.fixture(autouse=True)
def _registry_as_it_was(monkeypatch):
    """What plugins add is gone after a test, and what autokern found in earnest is there again."""
    monkeypatch.setattr(registry, "_ops", {op.name: op for op in registry.registered()})
    monkeypatch.setattr(registry, "_plugins", registry._plugins)
    monkeypatch.setattr(registry, "_announced", set())
    before = {op.name: list(op.candidates) for op in registered()}
    yield
    for name, candidates in before.items():
        get(name).candidates[:] = candidates


@pytest.fixture
def install(monkeypatch, tmp_path):
    """A maker of installed packages: by entry points `package:name = value`, with modules of given text."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(points, **modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)
        install_entry_points(monkeypatch, points)
        registry._announced.clear()
        return {plugin.source: plugin for plugin in registry.plugins()}

    yield make
    for name in ("theirs", "others"):
        sys.modules.pop(name, None)


def test_a_function_and_a_module(install):
    found = install({"pack:one": "theirs:register", "pack:two": "others"}, theirs=GOOD, others=OTHERS)
    assert [p.state for p in found.values()] == ["loaded", "loaded"]
    assert get("qr")["theirs"].source == "pack:one"
    assert get("qr")["theirs"].summary == "Theirs."
    assert get("fantasy")["others"].source == "pack:two"
    assert get("qr").stock.source == ""
    with autokern.using(force={"qr": "theirs"}):
        q, _ = autokern.linalg.qr(torch.eye(5))
    assert q.shape == (5, 5)
    assert autokern.explain("qr", m=3, n=3).excluded["theirs"] == "too small"


@pytest.mark.parametrize(
    ("value", "text", "words"),
    [
        ("theirs:register", HALF.format("raise ValueError('out of\\norder')"), "ValueError: out of order"),
        ("theirs:register", HALF.format("raise SystemExit(3)"), "SystemExit: 3"),
        ("theirs:register", HALF.format("import none_such"), "ModuleNotFoundError: No module named 'none_such'"),
        ("theirs:register", HALF.format("autokern.op('qr').candidate('theirs')"), "qr.theirs: registered twice"),
        ("theirs:register", HALF.format("autokern.op('fantasy').candidate('stock')"), "stock: registered twice"),
        ("theirs:register", HALF.format("autokern.op('nonsense')"), "SettingsError: unknown op 'nonsense'"),
        ("no_such_module", GOOD, "ModuleNotFoundError"),
        ("theirs:nothing", GOOD, "AttributeError"),
        ("theirs:NUMBER", GOOD + "NUMBER = 3", "theirs:NUMBER is neither a module nor a function"),
    ],
)
def test_what_fails_is_taken_back_and_told_of_once(install, value, text, words):
    before = {o.name: o.names() for o in registered()}
    found = install({"pack:bad": value, "pack:good": "others"}, theirs=text, others=OTHERS)
    assert [p.state for p in found.values()] == ["failed", "loaded"]
    assert words in found["pack:bad"].failure
    assert {o.name: o.names() for o in registered()} == {**before, "fantasy": [*before["fantasy"], "others"]}
    with pytest.warns(AutokernWarning, match=rf"candidates of pack:bad \({value}\).*all other candidates work"):
        dispatch.reset()
    dispatch.reset()  # without a warning
    assert autokern.linalg.qr(torch.eye(4))[0].shape == (4, 4)


def test_strict_raises_instead(install, monkeypatch):
    install({"pack:bad": "theirs"}, theirs="raise ValueError('no')")
    monkeypatch.setenv("AUTOKERN_STRICT", "1")
    for _ in range(2):
        with pytest.raises(AutokernError, match="found: ValueError: no"):
            dispatch.reset()
    monkeypatch.delenv("AUTOKERN_STRICT")
    dispatch.reset()


def test_metadata_that_cannot_be_read(monkeypatch):
    def broken(*, group):
        raise ValueError("a damaged file")

    monkeypatch.setattr(importlib.metadata, "entry_points", broken)
    monkeypatch.setattr(registry, "_plugins", None)
    assert [(p.state, p.failure) for p in registry.plugins()] == [("failed", "ValueError: a damaged file")]


def test_what_an_older_checkout_had_is_passed_over(install):
    found = install({"autokern:gone": "autokern.backends.gone", "autokern:keops": "autokern.backends.keops_product"})
    assert {source: plugin.state for source, plugin in found.items()} == {"keops": "loaded"}


def _installed(folder: Path, name: str, code: str, points: str) -> None:
    """Install a package of one module, without pip."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[autokern.candidates]\n{points}\n")


@pytest.mark.slow
def test_a_plugin_may_enable_autokern(tmp_path):
    _installed(tmp_path, "eager", "import autokern.auto\nimport autokern\nautokern.stats()\n", "x = eager")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import autokern; autokern.enable(); print('enabled')"
    assert said(program)[-1:] == ["enabled"]


@pytest.mark.slow
def test_the_example_in_the_docs_works_whichever_is_imported_first(tmp_path):
    text = (DOCS / "add-a-candidate.md").read_text()
    code = re.search(r"```python\n# autokern_scipy.py\n(.*?)```", text, re.DOTALL)[1]
    test = re.search(r"```python\n(def test_contract.*?)```", text, re.DOTALL)[1]
    points = re.search(r'\[project.entry-points."autokern.candidates"\]\n(.*?)```', text, re.DOTALL)[1]
    _installed(tmp_path, "autokern-scipy", f"{code}\n\n{test}", points.replace('"', ""))
    see = "print([c.source for c in autokern.op('qr').candidates if c.name == 'scipy-qr'])"
    lazy = "print('autokern.backends.keops_product' in sys.modules)"
    use = "import autokern_scipy; autokern_scipy.test_contract()"
    there = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "AUTOKERN_HOME": str(tmp_path / "home")}
    for first in ("import sys, autokern", "import sys, autokern_scipy, autokern; autokern.enable()"):
        assert said(f"{first}; {see}; {lazy}; {use}", **there) == ["['autokern-scipy:scipy']", "False"]


def of_plugins():
    return [doctor._of_plugin(plugin) for plugin in registry.plugins()]


def test_doctor_lists_every_plugin(install):
    points = {"a:good": "theirs:register", "b:bad": "others", "c:idle": "idle"}
    install(points, theirs=GOOD, others="raise ValueError('no')", idle="")
    good, bad, idle = of_plugins()
    assert good == Finding("plugin a:good", "ok", "qr.theirs: available", "")
    assert (bad.name, bad.status, bad.found) == ("plugin b:bad", "problem", "could not be loaded: ValueError: no")
    assert (idle.name, idle.status, idle.found) == ("plugin c:idle", "note", "adds no candidate")
    assert bad.advice
    assert idle.advice


def test_backends_that_are_absent_say_what_to_install(monkeypatch):
    from autokern.backends import keops_product

    monkeypatch.setattr(keops_product, "_spec", lambda package: None)
    (plugin,) = [found for found in of_plugins() if found.name == "plugin keops"]
    assert (plugin.status, bool(plugin.advice)) == ("note", True)
    assert "pip install 'autokern[keops]'" in plugin.found


def test_an_answer_that_raises_means_that_it_cannot_serve(install):
    text = GOOD.replace("None if p.n > 3 else", "1 / 0 or")
    assert install({"p:x": "thrower:register"}, thrower=text)["p:x"].state == "loaded"
    assert get("qr")["theirs"].why_not(Problem(op="qr", m=9, n=4)) == (
        "its unsupported raised ZeroDivisionError: division by zero"
    )
    assert "ZeroDivisionError" in of_plugins()[0].found


def test_a_package_that_imports_autokern_and_holds_the_entry_point_waits_for_its_import(install, monkeypatch):
    package = SimpleNamespace(__spec__=SimpleNamespace(_initializing=True), __path__=[])
    monkeypatch.setitem(sys.modules, "outer", package)
    assert install({"p:x": "outer.candidates:register"})["p:x"].state == "waiting"
    assert not registry._is_being_imported("autokern.backends.recorded")


def test_the_ops_that_own_plugins_add_to_are_those_that_the_registry_names():
    found = {}
    for one in registry.registered():
        for candidate in one.listed:
            if candidate.source in registry._OWN:
                found.setdefault(candidate.source, set()).add(one.name)
    assert found == {source: set(ops) for source, ops in registry._OWN.items()}


def test_an_op_loads_the_plugins_that_add_to_it_and_imports_no_other_op():
    code = """
import sys
import autokern
from autokern.core import registry

before = {name for name in sys.modules if name.startswith("autokern.ops.")}
assert [c.name for c in registry.get("fantasy").candidates][0] == "stock"
assert "autokern.backends.keops_product" not in sys.modules
assert {name for name in sys.modules if name.startswith("autokern.ops.")} <= before | {"autokern.ops.fantasy"}
sources = {c.name: c.source for c in registry.get("inv_quad_logdet").candidates}
assert sources["stock"] == sources["potri"] == ""
assert "autokern.backends.keops_product" not in sys.modules
assert {c.source for c in registry.get("kernel_matmul").candidates} == {"", "keops"}
assert {p.source: p.state for p in registry.plugins()}["cuda_graphs"] == "loaded"
"""
    said(code)
