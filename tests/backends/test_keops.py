"""keops_product.py: obstacles to KeOps that are found without compiling."""

import subprocess
import sys
import types
from unittest import mock

import pytest
from support.fakes import as_if_of_autokern

from autokern.backends import keops_product as keops
from autokern.core.errors import KeOpsError
from autokern.system import host


@pytest.fixture
def pykeops(monkeypatch, tmp_path):
    """A pykeops that nobody needs to install, with a build folder of its own."""
    module = types.ModuleType("pykeops")
    module.verbose = "some"
    module.get_build_folder = lambda: str(tmp_path)
    module.config = types.SimpleNamespace(gpu_available=False, pykeops_nvrtc_name=lambda type: str(tmp_path / "nvrtc"))
    core = types.ModuleType("keopscore")
    core.verbose = "all"
    monkeypatch.setitem(sys.modules, "pykeops", module)
    monkeypatch.setitem(sys.modules, "keopscore", core)
    monkeypatch.setattr(keops, "installed", lambda package: True)
    monkeypatch.setattr(keops, "compiler", lambda: "g++")
    return module


def test_obstacles(pykeops, monkeypatch, tmp_path):
    assert keops.keops_problem() is None
    assert "kind mps" in keops.keops_problem("mps")
    assert "no CUDA toolkit" in keops.keops_problem("cuda")  # it would crash
    pykeops.config.gpu_available = True
    assert "interface" in keops.keops_problem("cuda")
    (tmp_path / "nvrtc").touch()
    assert keops.keops_problem("cuda") is None
    pykeops.get_build_folder = lambda: str(tmp_path / "gone")
    assert "cannot be written" in keops.keops_problem()
    with pytest.raises(KeOpsError, match="KEOPS_CACHE_FOLDER"), keops.at_work():
        raise AssertionError("it is not tried")
    monkeypatch.setattr(keops, "compiler", lambda: None)
    assert "C++ compiler" in keops.keops_problem()
    monkeypatch.delitem(sys.modules, "pykeops")
    monkeypatch.setitem(sys.modules, "gpytorch.kernels.keops.keops_kernel", types.ModuleType("keops_kernel"))
    assert "importing it fails" in keops.keops_problem()
    monkeypatch.setattr(keops, "installed", lambda package: False)
    assert keops.keops_problem().startswith("pykeops is not installed")


def test_the_compiler_is_found_by_the_rule_of_torch_and_keops(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert host.compiler() is None
    (tmp_path / "mine").write_text("#!/bin/sh\n")
    (tmp_path / "mine").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "mine"))
    assert host.compiler() == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("ends", "says", "children"),
    [
        (lambda: types.SimpleNamespace(returncode=0), "", 1),
        (lambda: types.SimpleNamespace(returncode=-11), "LD_PRELOAD", 1),
        (lambda: types.SimpleNamespace(returncode=-6), "status -6", 1),
        (lambda: types.SimpleNamespace(returncode=1), "status 1", 2),  # memory may be there another time
        (mock.Mock(side_effect=subprocess.TimeoutExpired("python", 120)), "TimeoutExpired", 2),
        (mock.Mock(side_effect=OSError("no more processes")), "OSError", 2),
    ],
)
@pytest.mark.parametrize("begun", [False, True])  # a mark that another process has not written yet counts as none
def test_the_first_formula_on_a_gpu_is_tried_by_a_child(pykeops, monkeypatch, tmp_path, ends, says, children, begun):
    tried, told = [], []
    monkeypatch.setattr(keops.subprocess, "run", lambda *command, **_: tried.append(command) or ends())
    pykeops.config.gpu_available = True
    (tmp_path / "nvrtc").touch()
    if begun:
        (tmp_path / f"autokern-{keops.torch.__version__}").touch()
    for _ in range(2):  # processes
        keops._trial.cache_clear()
        for _ in range(2):
            try:
                with keops.at_work("cuda"):
                    told.append("")
            except KeOpsError as error:
                told.append(str(error))
    keops._trial.cache_clear()
    assert told[::2] == told[1::2], "each process tries once"
    assert [(says in one, bool(one)) for one in told] == [(True, bool(says))] * 4
    assert len(tried) == children


def test_its_messages_are_off_while_it_works_and_as_before_afterwards(pykeops):
    core = sys.modules["keopscore"]
    with keops.at_work():
        with keops.at_work():
            assert (pykeops.verbose, core.verbose) == (False, False)
        assert (pykeops.verbose, core.verbose) == (False, False)
    assert (pykeops.verbose, core.verbose) == ("some", "all")

    @as_if_of_autokern
    def fails():
        with keops.at_work():
            raise ValueError("no good")

    with pytest.raises(KeOpsError):
        fails()
    assert (pykeops.verbose, core.verbose) == ("some", "all")
