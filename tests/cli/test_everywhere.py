"""Processes that are served: by `autokern everywhere`, by the recipes of docs/workers.md, and by pytest's plugin."""

import importlib.util
import json
import os
import re
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


OPTUNA = """
import threading
import autokern.auto
import optuna, torch
from gpytorch.kernels import RBFKernel

optuna.logging.set_verbosity(optuna.logging.WARNING)
points, seen = torch.rand(70, 2, dtype=torch.float64), set()

def objective(trial):
    seen.add(threading.current_thread().name)
    kernel = RBFKernel().double()
    kernel.lengthscale = trial.suggest_float("lengthscale", 0.1, 1.0)
    return kernel(points).to_dense().sum().item()

study = optuna.create_study()
study.optimize(objective, n_trials=8, n_jobs=2)
print(sum(autokern.stats()["kernel_matrix"].values()) == 8 and "MainThread" not in seen)
"""

RAY = """
import ray

@ray.remote
def fit(seed):
    import autokern.auto
    import torch
    from gpytorch.kernels import RBFKernel
    RBFKernel().double()(torch.rand(70, 2, dtype=torch.float64)).to_dense()
    return sum(autokern.stats()["kernel_matrix"].values())

ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")
print(ray.get(fit.remote(0)) == 1)
ray.shutdown()
"""

AX = """
import autokern.auto
from ax.api.client import Client
from ax.api.configs import RangeParameterConfig

client = Client()
client.configure_experiment(parameters=[RangeParameterConfig(name="x", parameter_type="float", bounds=(0.0, 1.0))])
client.configure_optimization(objective="-loss")
for _ in range(7):
    for index, parameters in client.get_next_trials(max_trials=1).items():
        client.complete_trial(trial_index=index, raw_data={"loss": (parameters["x"] - 0.3) ** 2})
print(bool({"objective", "exact_log_prob"} & set(autokern.stats())))
"""


RECIPES = {"optuna": OPTUNA, "ray": RAY, "ax": AX}


@pytest.mark.slow
@pytest.mark.parametrize("package", RECIPES)
def test_a_recipe_serves_the_workers(package, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    path = tmp_path / "program.py"
    path.write_text(RECIPES[package])
    run = python(path, cwd=tmp_path, RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "True", run.stdout + run.stderr


TESTS = """
import autokern, gpytorch, pytest, torch

@pytest.mark.parametrize("n", [30, 40])
def test_kernel(n):
    assert autokern.is_enabled() == {on}
    gpytorch.kernels.RBFKernel()(torch.rand(n, 2)).to_dense()
"""


def told(folder, *options, on=True, **environment):
    (folder / "test_theirs.py").write_text(TESTS.format(on=on))
    command = ["-m", "pytest", "-q", "-p", "autokern.pytest", "-p", "no:cacheprovider", *options]
    ended = python(*command, cwd=folder, AUTOKERN_CALIBRATE="never", **environment)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("options", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)])
def test_tests_are_served_and_calls_counted(tmp_path, options):
    status, text = told(tmp_path, *options)
    assert status == 0, text
    found = re.search(r"autokern: (\d+) calls served by candidates, (\d+) by the library's own code\n", text)
    assert sum(map(int, found.groups())) == 2, text


@pytest.mark.slow
def test_why_it_is_off_and_a_bad_variable(tmp_path):
    status, text = told(tmp_path, on=False, AUTOKERN="0")
    assert status == 0, text
    assert "autokern: 0 calls served by candidates, 0 by the library's own code (AUTOKERN=0 keeps it off)" in text
    status, text = told(tmp_path, AUTOKERN_BUDGET="soon")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert text.startswith("ERROR: ")
    assert "AUTOKERN_BUDGET" in text
