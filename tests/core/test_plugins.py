"""Plugins: candidates by entry points, what becomes of those that fail, and what doctor says of them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import autokern
from autokern import op
from autokern.cli import doctor, plugin_check
from autokern.cli.plugin_check import Backend, judged
from autokern.core import plugins, registry
from autokern.core.errors import AutokernError, AutokernWarning
from autokern.core.problem import Problem
from autokern.core.registry import get, known, registered
from autokern.runtime import dispatch
from autokern.system import subprocess_probe
from autokern.system.subprocess_probe import Answer

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
HALF = GOOD + "    autokern.op('matmul').candidate('half')(lambda a: a)\n    {}\n"


@pytest.fixture(autouse=True)
def _registry_as_it_was(monkeypatch):
    """What plugins add is gone after a test, and what autokern found in earnest is there again."""
    monkeypatch.setattr(registry, "_ops", {op.name: op for op in registry.registered()})
    monkeypatch.setattr(plugins, "_plugins", plugins._plugins)
    monkeypatch.setattr(plugins, "_announced", set())
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
        found = []
        for label, value in points.items():
            package, _, name = label.partition(":")
            point = EntryPoint(name, value, plugins.GROUP)
            vars(point).update(dist=SimpleNamespace(name=package))
            found.append(point)
        monkeypatch.setattr(
            importlib.metadata, "entry_points", lambda *, group: found if group == plugins.GROUP else []
        )
        plugins._reset()
        plugins.load()
        return {plugin.source: plugin for plugin in plugins.loaded()}

    yield make
    for name in ("theirs", "others"):
        sys.modules.pop(name, None)


def test_autokern_brings_its_own():
    own = ["cuda_graphs", "cupy", "keops", "lower_precision", "xla"]
    assert [(p.source, p.state) for p in plugins.loaded()][:5] == [(name, "loaded") for name in own]
    assert get("kernel_matmul")["xla"].source == "xla"
    assert {o.name for o in registered() for c in o.candidates if c.source == "cupy"} == {"cholesky", "qr"}
    assert {c.source for o in registered() for c in o.candidates} == {"", *own}


def test_a_function_and_a_module(install):
    found = install(
        {"pack:one": "theirs:register", "pack:two": "others"},
        theirs=GOOD,
        others="from autokern.core.registry import get\nget('matmul').candidate('others')(lambda a: a)",
    )
    assert [p.state for p in found.values()] == ["loaded", "loaded"]
    assert get("qr")["theirs"].source == "pack:one"
    assert get("qr")["theirs"].summary == "Theirs."
    assert get("matmul")["others"].source == "pack:two"
    assert get("qr").stock.source == ""
    with autokern.using(force={"qr": "theirs"}):
        q, _ = autokern.linalg.qr(torch.eye(5))
    assert q.shape == (5, 5)
    assert autokern.explain("qr", m=3, n=3).excluded["theirs"] == "too small"


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("raise ValueError('out of\\norder')", "ValueError: out of order"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import no_such_backend", "ModuleNotFoundError: No module named 'no_such_backend'"),
        ("autokern.op('qr').candidate('theirs')", "AutokernError: qr.theirs: registered twice"),
        ("autokern.op('matmul').candidate('stock')", "AutokernError: matmul.stock: registered twice"),
        ("autokern.op('nonsense')", "SettingsError: unknown op 'nonsense'"),
    ],
)
def test_what_fails_is_taken_back_and_told_of_once(install, ending, words):
    before = {o.name: o.names() for o in registered()}
    found = install({"pack:bad": "theirs:register"}, theirs=HALF.format(ending))
    assert found["pack:bad"].state == "failed"
    assert words in found["pack:bad"].failure
    assert {o.name: o.names() for o in registered()} == before
    with pytest.warns(AutokernWarning, match=r"candidates of pack:bad \(theirs:register\).*all other candidates work"):
        dispatch.reset()
    dispatch.reset()  # without a warning
    assert autokern.linalg.qr(torch.eye(4))[0].shape == (4, 4)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no_such_module", "ModuleNotFoundError"),
        ("theirs:nothing", "AttributeError"),
        ("theirs:NUMBER", "theirs:NUMBER is neither a module nor a function"),
    ],
)
def test_entry_points_that_lead_nowhere(install, value, words):
    found = install({"pack:bad": value, "pack:good": "theirs:register"}, theirs=GOOD + "NUMBER = 3")
    assert words in found["pack:bad"].failure
    assert found["pack:good"].state == "loaded"
    assert "theirs" in get("qr").names()


def test_an_op_of_a_plugin_goes_with_it(install):
    text = "from autokern.core.op import get\ntype('Own', (type(get('qr')),), {'name': 'own'})()\nraise ValueError"
    assert install({"pack:bad": "theirs"}, theirs=text)["pack:bad"].state == "failed"
    assert not known("own")


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
    plugins._reset()
    plugins.load()
    assert [(p.state, p.failure) for p in plugins.loaded()] == [("failed", "ValueError: a damaged file")]


def test_a_profile_may_know_a_candidate_that_is_gone(install):
    install({"pack:one": "theirs:register"}, theirs=GOOD)
    known = autokern.calibrate(["qr"], budget=2.0, progress=False)
    assert any("theirs" in trial.timings for trial in known.trials)
    get("qr").candidates[:] = [c for c in get("qr").candidates if c.name != "theirs"]
    dispatch.reset()
    assert autokern.explain("qr", m=500, n=50).candidate in get("qr").names()
    assert "theirs" not in autokern.explain("qr", m=500, n=50).predicted


# --- a real package ---------------------------------------------------------------------------------------------------


def _install_the_example(folder: Path) -> None:
    """Install the package of docs/add-a-candidate.md, without pip."""
    text = (DOCS / "add-a-candidate.md").read_text()
    code = re.search(r"```python\n# autokern_scipy.py\n(.*?)```", text, re.DOTALL)[1]
    test = re.search(r"```python\n(def test_contract.*?)```", text, re.DOTALL)[1]
    points = re.search(r'\[project.entry-points."autokern.candidates"\]\n(.*?)```', text, re.DOTALL)[1]
    (folder / "autokern_scipy.py").write_text(f"{code}\n\n{test}")
    info = folder / "autokern_scipy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: autokern-scipy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[autokern.candidates]\n{points.replace(chr(34), '')}")


@pytest.mark.slow
def test_the_example_in_the_docs_works_whichever_is_imported_first(tmp_path):
    _install_the_example(tmp_path)
    see = "print([c.source for c in autokern.op('qr').candidates if c.name == 'scipy-qr'], 'jax' in sys.modules)"
    use = "import autokern_scipy; autokern_scipy.test_contract()"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "AUTOKERN_HOME": str(tmp_path / "home"),
    }
    told = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for program in (
            f"import sys, autokern; {see}; {use}",
            f"import sys, autokern_scipy, autokern; autokern.enable(); {see}; {use}",
        )
    ]
    assert [(p.communicate()[0].strip(), p.returncode) for p in told] == 2 * [("['autokern-scipy:scipy'] False", 0)]


# --- what doctor says -------------------------------------------------------------------------------------------------


def test_doctor_lists_every_plugin(install, monkeypatch, tmp_path):
    (tmp_path / "program.py").write_text("print('works')")
    monkeypatch.setattr(subprocess_probe, "PROGRAMS", dict.fromkeys(subprocess_probe.PROGRAMS, tmp_path / "program.py"))
    install(
        {"a:good": "theirs:register", "b:bad": "others", "c:idle": "idle"},
        theirs=GOOD,
        others="raise ValueError('no')",
        idle="",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutokernWarning)
        found = {f.name: f for f in doctor.examine(quick=True)}
    good, bad, idle = (found[f"plugin {name}"] for name in ("a:good", "b:bad", "c:idle"))
    assert (good.status, good.found) == ("ok", "qr.theirs: available, not tried")
    assert (bad.status, bad.found) == ("problem", "could not be loaded: ValueError: no")
    assert (idle.status, idle.found) == ("note", "adds no candidate")
    assert all(f.advice for f in (bad, idle))


def test_backends_that_are_absent_say_what_to_install(monkeypatch):
    from autokern.backends import xla

    monkeypatch.setattr(xla, "installed", lambda package: False)
    found = {b.source: b for b in plugin_check.backends()}["xla"]
    assert not found.may_work
    status, words, advice = judged(found, None)
    assert (status, bool(advice)) == ("note", True)
    assert "pip install 'autokern[xla]'" in words


BACKEND = Backend("them", ["qr.theirs", "cholesky.theirs"], "", "")


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (Answer(True, '{"them": [1.5, ""]}', 2.0), "ok", "works (1.5 s"),
        (Answer(True, '{"them": [1.5, "qr.theirs raised"]}', 2.0), "problem", "qr.theirs raised"),
        (Answer(True, "goodbye", 2.0), "problem", "goodbye"),
        (Answer(False, "killed by signal 11", 2.0), "problem", "signal 11"),
        (Answer(False, "did not finish", 27.0, True), "note", "did not finish"),
        (None, "ok", "not tried"),
    ],
)
def test_what_came_of_trying_is_judged(answer, status, words):
    found = judged(BACKEND, answer)
    assert found[0] == status
    assert words in found[1]
    assert bool(found[2]) == (status != "ok")
    assert status != "problem" or "AUTOKERN_EXCLUDE=qr=theirs,cholesky=theirs" in found[2]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return torch.linalg.qr(a)", ""),
        ("q, r = torch.linalg.qr(a); return 2 * q, r", "misses the contract"),
        ("1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_candidates_are_tried(install, body, words):
    text = f"import autokern, torch\n@autokern.op('qr').candidate('theirs')\ndef theirs(a):\n    {body}\n"
    install({"pack:one": "theirs"}, theirs=text)
    seconds, wrong = plugin_check.tried()["pack:one"]
    assert seconds > 0
    assert words in wrong
    assert bool(words) == bool(wrong)


@pytest.mark.slow
def test_trying_is_a_program_of_its_own():
    told = subprocess.run(
        [sys.executable, subprocess_probe.PROGRAMS["plugins"]], capture_output=True, text=True, check=True
    )
    found = json.loads(told.stdout.splitlines()[-1])
    assert {"xla", "cupy"} <= set(found)
    assert all(not wrong for _, wrong in found.values())


def test_source_survives_where_candidates_are_shown():
    candidate = op("kernel_matmul")["xla"]
    assert candidate.compiles
    assert candidate.why_not(Problem(op="kernel_matmul", batch=100)) is not None


def test_an_answer_that_raises_means_that_it_cannot_serve(install):
    text = GOOD.replace("None if p.n > 3 else", "1 / 0 or")
    assert install({"p:x": "thrower:register"}, thrower=text)["p:x"].state == "loaded"
    assert get("qr")["theirs"].why_not(Problem(op="qr", m=9, n=4)) == (
        "its unsupported raised ZeroDivisionError: division by zero"
    )
    (found,) = [b for b in plugin_check.backends() if b.source == "p:x"]
    assert "ZeroDivisionError" in found.obstacle


def test_a_package_that_imports_autokern_and_holds_the_entry_point_waits_for_its_import(install, monkeypatch):
    package = SimpleNamespace(__spec__=SimpleNamespace(_initializing=True), __path__=[])
    monkeypatch.setitem(sys.modules, "outer", package)
    assert install({"p:x": "outer.candidates:register"})["p:x"].state == "waiting"
    assert not plugins._is_being_imported("autokern.backends.xla")
