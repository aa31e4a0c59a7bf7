"""Write `autokern/model/relied.json`: which functions of the libraries densities, predictions and fantasies run.

Small models of the program of torture T14 run without autokern, and every recorded function is noted that returns
numbers. Classes of kernels, means, constraints, priors and likelihoods are left out: readings rely on those by type.
What is named here returns none, is of torch, or is run only before or after.
With ``--check`` nothing is written, and the exit status tells whether the file is what was found.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch import likelihoods
from gpytorch.mlls import ExactMarginalLogLikelihood

from autokern.core.releases.recorded import table

HERE = Path(__file__).parent
FILE = HERE.parent / "autokern" / "model" / "relied.json"
BY_TYPE = ("gpytorch.kernels", "gpytorch.means", "gpytorch.constraints", "gpytorch.priors", "gpytorch.likelihoods")
_OPERATORS = "linear_operator.operators."
_MEMOIZE = "linear_operator.utils.memoize:"
_OPERATOR = f"{_OPERATORS}_linear_operator:LinearOperator."
_TRIANGULAR = f"{_OPERATORS}triangular_linear_operator:TriangularLinearOperator."
_LAZY = "gpytorch.lazy.lazy_evaluated_kernel_tensor:LazyEvaluatedKernelTensor."
_STRATEGY = "gpytorch.models.exact_prediction_strategies:"
_NORMAL = "distributions.multivariate_normal:MultivariateNormal."
_TORCH = {"torch.nn.functional:": "softplus", "torch:": "exp sigmoid"}
BESIDE: dict[str, dict[str, str]] = {
    "algebra": {
        _OPERATOR: "_kwargs add_diagonal batch_shape inv_quad_logdet representation_tree size to_dense",
        f"{_OPERATORS}added_diag_linear_operator:AddedDiagLinearOperator.": "__init__",
        f"{_OPERATORS}chol_linear_operator:CholLinearOperator.": "_chol_diag inv_quad_logdet",
        f"{_OPERATORS}dense_linear_operator:DenseLinearOperator.": "__init__ _cholesky_solve _size",
        f"{_OPERATORS}diag_linear_operator:ConstantDiagLinearOperator.": "_size",
        f"{_OPERATORS}low_rank_root_linear_operator:": "LowRankRootLinearOperator",
        f"{_OPERATORS}root_linear_operator:RootLinearOperator.": "to_dense",
        f"{_OPERATORS}sum_linear_operator:SumLinearOperator.": "__init__",
        _TRIANGULAR: "__init__ _cholesky_solve",
        _MEMOIZE: "_is_in_cache",
        f"torch.{_NORMAL}": "mean",
        "torch.distributions.utils:lazy_property.": "__get__",
    },
    "density": {
        **_TORCH,
        f"gpytorch.{_NORMAL}": "_unbroadcasted_scale_tril",
        f"torch.{_NORMAL}": "log_prob",
        "torch.distributions.multivariate_normal:": "_batch_mahalanobis",
        _LAZY: "representation_tree",
        "gpytorch.module:": "_extract_named_added_loss_terms _extract_named_priors",
    },
    "tasks": {f"{_OPERATORS}psd_sum_linear_operator:": "PsdSumLinearOperator"},
    "prediction": {
        **_TORCH,
        f"gpytorch.{_NORMAL}": "__init__",
        _LAZY: "representation_tree",
        f"{_STRATEGY}DefaultPredictionStrategy.": "__init__ num_train train_shape",
        _STRATEGY: "prediction_strategy",
        "linear_operator.functions._matmul:": "Matmul",
        "linear_operator.functions._solve:": "Solve",
        _OPERATOR: "_choose_root_method",
        _TRIANGULAR: "inverse solve",
    },
    "fantasy": {
        f"{_STRATEGY}DefaultPredictionStrategy.": "get_fantasy_strategy",
        f"{_OPERATORS}cat_linear_operator:": "CatLinearOperator",
        f"{_OPERATORS}root_linear_operator:RootLinearOperator.": "__init__",
        f"{_OPERATORS}chol_linear_operator:CholLinearOperator.": "__init__",
        "linear_operator.utils.pinverse:": "stable_pinverse",
        "linear_operator.utils.qr:": "stable_qr",
    },
    "memory": {
        _MEMOIZE: "_add_to_cache _cached _get_from_cache _is_in_cache add_to_cache clear_cache_hook",
        _OPERATOR: "_args _kwargs evaluate_kernel representation representation_tree",
        f"{_OPERATORS}linear_operator_representation_tree:LinearOperatorRepresentationTree.": "__call__",
    },
}
"""By route, what returns no numbers, is of torch, or is run only before or after, and operators that inherit all they
run: modules and classes, and names."""
BEYOND = {"density": "algebra", "tasks": "density", "prediction": "algebra", "fantasy": "prediction"}
"""The route that each one has as a part."""
sys.path.insert(0, str(HERE.parent / "tests" / "torture"))
program, trace = (importlib.import_module(f"release_{name}") for name in ("program", "sources"))


def density(model: Any) -> None:
    model.train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    for _ in range(2):
        (-mll(model(*model.train_inputs), model.train_targets)).sum().backward()


def prediction(model: Any, fast: bool, grad: bool) -> None:
    model.eval()
    x = program.data(7, model.train_inputs[0].shape[-1], 5)[0].requires_grad_(grad)
    if model.train_inputs[0].dim() > 2:
        x = x.detach().expand(2, -1, -1)
    with gpytorch.settings.fast_pred_var(fast), torch.set_grad_enabled(grad):
        found = model(x)
        total = found.mean.sum() + found.variance.sum()
        if x.requires_grad:
            torch.autograd.grad(total, x)
        if type(model.likelihood) is not likelihoods.FixedNoiseGaussianLikelihood:
            observed = model.likelihood(model(x))
            _ = observed.covariance_matrix, observed.variance
        _ = model(x).covariance_matrix


def fantasy(model: Any) -> None:
    model.eval()
    with torch.no_grad():
        x, y = program.data(3, model.train_inputs[0].shape[-1], 6)
        model(x)
        for targets in (torch.stack([y, y + 1]), y):
            grown = model.get_fantasy_model(x, targets)
            _ = grown(program.data(5, x.shape[-1], 4)[0]).covariance_matrix


def recorded() -> dict[str, list[str]]:
    """Return the names of functions by route."""
    exact = [program.constrained, program.bounded, program.composed, program.one_dimensional]
    exact += [program.fixed_noise, program.cases.MODELS["ExactGP, a batch of two"]]
    tasks = [program.cases.MODELS["multitask, Kronecker"], program.independent, program.of_modes]
    switches = [(fast, grad) for fast in (False, True) for grad in (False, True)]
    runs: dict[str, list[Callable[[], None]]] = {
        "density": [lambda make=make: density(make().mll.model) for make in exact],
        "tasks": [lambda make=make: density(make().mll.model) for make in tasks],
        "prediction": [
            lambda make=make, how=how: prediction(make().mll.model, *how) for make in exact for how in switches
        ],
        "fantasy": [lambda make=make: fantasy(make().mll.model) for make in exact[:3]],
    }
    code, found = table()["code"], {}
    for route, several in runs.items():
        names = set()
        for run in several:
            for function, seen in trace.traced(run).items():
                named = function.outer in code.get(function.module, {})
                if named and seen.returned and not function.module.startswith((*BY_TYPE, "botorch")):
                    names.add(f"{function.module}:{function.outer}")
        found[route] = sorted(names)
    found["algebra"] = sorted({*found["density"]} & {*found["prediction"]})
    for route, beside in BESIDE.items():
        names = {f"{place}{name}" for place, several in beside.items() for name in several.split()}
        found[route] = sorted(names.union(found.get(route, ()), found.get(BEYOND.get(route, ""), ())))
    return found


def main() -> int:
    """Write the file, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = json.dumps(recorded(), indent=1) + "\n"
    if options.check:
        return int(FILE.read_text() != text)
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
