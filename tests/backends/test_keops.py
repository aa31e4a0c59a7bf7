"""keops_product.py: obstacles to KeOps that are found without compiling."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
from support.fakes import as_if_of_autokern

from autokern.backends import keops_product as keops
from autokern.core.errors import KeOpsError


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
    monkeypatch.setattr(keops, "installed", lambda package: True)
    monkeypatch.setattr(keops, "compiler", lambda: "g++")
    return module


def test_it_works(pykeops):
    assert keops.keops_problem() is None
    assert "kind mps" in keops.keops_problem("mps")


def test_not_installed_and_not_importable(pykeops, monkeypatch):
    monkeypatch.delitem(sys.modules, "pykeops")
    monkeypatch.setitem(sys.modules, "gpytorch.kernels.keops.keops_kernel", types.ModuleType("keops_kernel"))
    assert "importing it fails" in keops.keops_problem()
    monkeypatch.setattr(keops, "installed", lambda package: False)
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


def _tried(pykeops, monkeypatch, tmp_path, ends) -> list[str]:
    """Use KeOps on a GPU in two processes; return what each was told, nothing where it worked."""
    tried, told = [], []
    monkeypatch.setattr(keops.subprocess, "run", lambda *command, **_: tried.append(command) or ends())
    pykeops.config.gpu_available = True
    (tmp_path / "nvrtc").touch()
    for _ in range(2):
        keops._trial.cache_clear()
        for _ in range(2):
            try:
                with keops.at_work("cuda"):
                    told.append("")
            except KeOpsError as error:
                told.append(str(error))
    keops._trial.cache_clear()
    assert told[::2] == told[1::2], "each process tries once"
    return [*told[::2], f"{len(tried)} children"]


@pytest.mark.parametrize(("status", "says", "children"), [(0, "", 1), (-11, "status -11", 1), (1, "status 1", 2)])
def test_the_first_formula_on_a_gpu_is_tried_by_a_child(pykeops, monkeypatch, tmp_path, status, says, children):
    """Once, unless it raises an error: memory may be there another time."""
    *told, count = _tried(pykeops, monkeypatch, tmp_path, lambda: types.SimpleNamespace(returncode=status))
    assert all(says in one for one in told)
    assert count == f"{children} children"


@pytest.mark.parametrize("error", [OSError("no more processes"), subprocess.TimeoutExpired("python", 120)])
def test_a_child_that_does_not_start_or_end_is_told_and_not_kept(pykeops, monkeypatch, tmp_path, error):
    def ends():
        raise error

    *told, count = _tried(pykeops, monkeypatch, tmp_path, ends)
    assert all(type(error).__name__ in one for one in told)
    assert count == "2 children"


def test_a_mark_that_another_process_has_not_written_yet_counts_as_none(pykeops, monkeypatch, tmp_path):
    (tmp_path / f"autokern-{keops.torch.__version__}").touch()
    assert _tried(pykeops, monkeypatch, tmp_path, lambda: types.SimpleNamespace(returncode=0)) == ["", "", "1 children"]


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
