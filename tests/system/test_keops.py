"""keops.py: obstacles to KeOps that are found without compiling."""

from __future__ import annotations

import importlib.util
import sys
import types
from contextlib import nullcontext

import pytest
from support.fakes import as_if_of_autokern

from autokern.core.errors import KeOpsError
from autokern.system import keops


@pytest.fixture
def pykeops(monkeypatch, tmp_path):
    """A pykeops that nobody needs to install, with a build folder of its own."""
    module = types.ModuleType("pykeops")
    module.verbose = True
    module.get_build_folder = lambda: str(tmp_path)
    module.config = types.SimpleNamespace(gpu_available=False, pykeops_nvrtc_name=lambda type: str(tmp_path / "nvrtc"))
    core = types.ModuleType("keopscore")
    core.verbose = False
    monkeypatch.setitem(sys.modules, "pykeops", module)
    monkeypatch.setitem(sys.modules, "keopscore", core)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(keops, "compiler", lambda: "g++")
    return module


def test_it_works(pykeops):
    assert keops.keops_problem() is None
    assert "kind mps" in keops.keops_problem("mps")


def test_not_installed_and_not_importable(pykeops, monkeypatch):
    monkeypatch.delitem(sys.modules, "pykeops")
    monkeypatch.setitem(sys.modules, "gpytorch.kernels.keops.keops_kernel", types.ModuleType("keops_kernel"))
    assert "importing it fails" in keops.keops_problem()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert keops.keops_problem().startswith("pykeops is not installed")


def test_no_compiler(pykeops, monkeypatch):
    monkeypatch.setattr(keops, "compiler", lambda: None)
    assert "C++ compiler" in keops.keops_problem()


def test_the_compiler_is_found_by_the_rule_of_keops(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert keops.compiler() is None
    (tmp_path / "mine").write_text("#!/bin/sh\n")
    (tmp_path / "mine").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "mine"))
    assert keops.compiler() == str(tmp_path / "mine")


def test_a_gpu_without_toolkit_is_told_before_it_crashes(pykeops, tmp_path):
    assert "no CUDA toolkit" in keops.keops_problem("cuda")
    pykeops.config.gpu_available = True
    assert "interface" in keops.keops_problem("cuda")
    (tmp_path / "nvrtc").touch()
    assert keops.keops_problem("cuda") is None


@pytest.mark.parametrize(("status", "works"), [(0, True), (-11, False)])
def test_the_first_formula_on_a_gpu_is_tried_once_by_a_child(pykeops, monkeypatch, tmp_path, status, works):
    tried, ended = [], types.SimpleNamespace(returncode=status)
    monkeypatch.setattr(keops.subprocess, "run", lambda *command, **_: tried.append(command) or ended)
    pykeops.config.gpu_available = True
    (tmp_path / "nvrtc").touch()
    for _ in range(2):  # two processes
        keops._trial.cache_clear()
        raised = nullcontext() if works else pytest.raises(KeOpsError, match="ended with status -11")
        with raised, keops.at_work("cuda"):
            pass
    assert len(tried) == 1
    keops._trial.cache_clear()


def test_a_build_folder_that_cannot_be_written(pykeops, monkeypatch, tmp_path):
    monkeypatch.setattr(pykeops, "get_build_folder", lambda: str(tmp_path / "gone"))
    assert "cannot be written" in keops.keops_problem()
    with pytest.raises(KeOpsError, match="KEOPS_CACHE_FOLDER"), keops.at_work():
        raise AssertionError("it is not tried")


def test_its_messages_are_off_while_it_works_and_as_before_afterwards(pykeops):
    core = sys.modules["keopscore"]
    with keops.at_work():
        with keops.at_work():
            assert (pykeops.verbose, core.verbose) == (False, False)
        assert (pykeops.verbose, core.verbose) == (False, False)
    assert (pykeops.verbose, core.verbose) == (True, False)

    @as_if_of_autokern
    def fails():
        with keops.at_work():
            raise ValueError("no good")

    with pytest.raises(KeOpsError):
        fails()
    assert (pykeops.verbose, core.verbose) == (True, False)
