"""Optuna: `BoTorchSampler` of optuna-integration on two parameters, 15 trials."""

import optuna
from optuna_integration import BoTorchSampler

optuna.logging.set_verbosity(optuna.logging.ERROR)


def objective(trial: optuna.Trial) -> float:
    x, y = trial.suggest_float("x", -4.0, 4.0), trial.suggest_float("y", -4.0, 4.0)
    return (x**2 + y - 11) ** 2 + (x + y**2 - 7) ** 2


study = optuna.create_study(sampler=BoTorchSampler(n_startup_trials=8, seed=0))
study.optimize(objective, n_trials=15)
print("final", *(trial.value for trial in study.trials))
