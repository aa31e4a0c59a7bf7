"""The recipes of docs/workers.md, where their packages are installed; `test_compare.py` has joblib and subprocesses."""

import importlib.util

import pytest
from support.programs import python

pytestmark = pytest.mark.slow

OPTUNA = """
import threading
import autokern.auto
import optuna, torch
from gpytorch.kernels import RBFKernel

optuna.logging.set_verbosity(optuna.logging.WARNING)
points, seen = torch.rand(30, 2, dtype=torch.float64), set()

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
    RBFKernel().double()(torch.rand(30, 2, dtype=torch.float64)).to_dense()
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


@pytest.mark.parametrize("package", RECIPES)
def test_a_recipe_serves_the_workers(package, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    path = tmp_path / "program.py"
    path.write_text(RECIPES[package])
    run = python(path, cwd=tmp_path, RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "True", run.stdout + run.stderr
