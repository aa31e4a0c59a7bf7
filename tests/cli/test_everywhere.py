"""`autokern everywhere`, in an environment of its own; and what enables it there and in workers."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from support.programs import python
from typer.testing import CliRunner

import autokern
from autokern.cli import inherited
from autokern.cli.commands import app

ROOT = Path(autokern.__file__).parents[1]
QUIET = ["-W", "ignore::FutureWarning"]


class Environment:
    """A virtual environment that sees the packages of this one."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=os.name != "nt")
        self.python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        self.site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        (self.site / "others.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")

    def __call__(self, *words: str, **variables: str) -> str:
        own = {name: text for name, text in os.environ.items() if not name.startswith(("AUTOKERN", "PYTHONPATH"))}
        options = {"env": {**own, **variables}, "capture_output": True, "text": True, "timeout": 280}
        run = subprocess.run([self.python, *QUIET, *words], check=False, **options)
        assert (run.returncode, run.stderr) == (0, "")
        return run.stdout


SERVED = "import gpytorch; print(hasattr(gpytorch.kernels.Kernel.covar_dist, '__wrapped__'))"
LIGHT = "import sys; print({'autokern', 'torch', 'importlib.util'} & set(sys.modules), len(sys.path))"


@pytest.mark.slow
def test_all_programs_of_an_environment_are_served_until_it_is_switched_off(tmp_path):
    inside = Environment(tmp_path / "env")
    before = inside("-c", LIGHT)
    assert inside("-m", "autokern", "everywhere").startswith("off: ")
    assert inside("-m", "autokern", "everywhere", "on") == f"on: {inside.site / 'autokern_everywhere.pth'}\n"
    assert json.loads(inside("-m", "autokern", "everywhere", "--json"))["state"] == "on"
    assert inside("-c", LIGHT) == before, "nothing is imported, and no path is added"
    assert inside("-c", SERVED).endswith("True\n")
    assert inside("-c", SERVED, AUTOKERN="0").endswith("False\n")
    assert inside("-m", "autokern", "explain", "qr", "--n", "20").startswith("qr(")
    assert inside("-m", "autokern", "everywhere", "off").startswith("off: ")
    assert inside("-c", SERVED).endswith("False\n")


@pytest.mark.slow
def test_the_file_outlives_autokern_without_harm(tmp_path):
    inside = Environment(tmp_path / "env")
    path = inside.site / "autokern_everywhere.pth"
    path.write_text(inherited._LINE.format(folder=str(tmp_path / "gone")))
    assert inside("-c", "import sys; print('gone' in str(sys.path))") == "False\n"
    assert inside("-m", "autokern", "everywhere", "status").startswith("on for an autokern that lies elsewhere")
    inside("-m", "autokern", "everywhere", "off")
    assert not path.exists()


def test_outside_of_a_virtual_environment_it_must_be_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(inherited, "file", lambda: tmp_path / "a.pth")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    result = CliRunner().invoke(app, ["everywhere", "on"])
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert not (tmp_path / "a.pth").exists()
    for word in ("on", "off"):
        result = CliRunner().invoke(app, ["everywhere", word, "--yes"])
        assert result.stdout.startswith(f"{word}: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["import autokern", "import torch, autokern.auto, autokern", "import linear_operator, autokern"]
)
def test_a_worker_is_served_whatever_it_imports_first(first):
    """The library's import within autokern's own once found half of autokern, which stayed off."""
    path = os.pathsep.join([inherited.INHERITED, str(ROOT)])
    code = f"{first}; print(autokern.is_enabled()); autokern.disable(); print(autokern.is_enabled())"
    run = python(*QUIET, "-c", code, PYTHONPATH=path)
    assert run.stdout.split()[-2:] == ["True", "False"]
    assert run.stderr == ""
