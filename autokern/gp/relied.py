"""What densities, predictions and fantasies rely on in the libraries, beside the classes that a model consists of.

`relied.json` has the functions that return numbers when stock computes them; `calibration/record_routes.py` writes it.
What is named here returns none, is of torch, or is run only before or after.
"""

from __future__ import annotations

import json
from pathlib import Path

from autokern.core.known import Relied, relied

__all__ = ["ALGEBRA", "DENSITY", "MEMORY", "PREDICTION", "TASKS", "density", "fantasy", "prediction"]

_run: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def _of(place: str, names: str) -> tuple[str, ...]:
    """Return full names from a module, with a class or not, and the names in it."""
    return tuple(f"{place}{name}" for name in names.split())


_OPERATORS = "linear_operator.operators."
_OPERATOR = f"{_OPERATORS}_linear_operator:LinearOperator."
_TRIANGULAR = f"{_OPERATORS}triangular_linear_operator:TriangularLinearOperator."
_LAZY = "gpytorch.lazy.lazy_evaluated_kernel_tensor:LazyEvaluatedKernelTensor."
_STRATEGY = "gpytorch.models.exact_prediction_strategies:DefaultPredictionStrategy."
_NORMAL = "distributions.multivariate_normal:MultivariateNormal."
_TORCH = (*_of("torch.nn.functional:", "softplus"), *_of("torch:", "exp sigmoid"))
ALGEBRA = (
    *sorted({*_run["density"]} & {*_run["prediction"]}),
    *_of(_OPERATOR, "_kwargs add_diagonal batch_shape inv_quad_logdet representation_tree size to_dense"),
    *_of(f"{_OPERATORS}added_diag_linear_operator:AddedDiagLinearOperator.", "__init__"),
    *_of(f"{_OPERATORS}chol_linear_operator:CholLinearOperator.", "_chol_diag inv_quad_logdet"),
    *_of(f"{_OPERATORS}dense_linear_operator:DenseLinearOperator.", "__init__ _cholesky_solve _size"),
    *_of(f"{_OPERATORS}diag_linear_operator:ConstantDiagLinearOperator.", "_size"),
    *_of(f"{_OPERATORS}root_linear_operator:RootLinearOperator.", "to_dense"),
    *_of(f"{_OPERATORS}sum_linear_operator:SumLinearOperator.", "__init__"),
    *_of(_TRIANGULAR, "__init__ _cholesky_solve"),
    *_of("linear_operator.utils.memoize:", "_is_in_cache"),
    *_of(f"torch.{_NORMAL}", "mean"),
    *_of("torch.distributions.utils:lazy_property.", "__get__"),
)
"""How a covariance is formed and factorised."""
DENSITY = (
    *ALGEBRA, *_run["density"], *_TORCH,
    *_of(f"gpytorch.{_NORMAL}", "_unbroadcasted_scale_tril"),
    *_of(f"torch.{_NORMAL}", "log_prob"),
    *_of("torch.distributions.multivariate_normal:", "_batch_mahalanobis"),
    *_of(_LAZY, "representation_tree"),
    *_of("gpytorch.module:", "_extract_named_added_loss_terms _extract_named_priors"),
)  # fmt: skip
"""How a marginal likelihood is computed from a prior."""
TASKS = (*DENSITY, *_run["tasks"])
"""How that of several tasks observed at the same points is computed."""
PREDICTION = (
    *ALGEBRA, *_run["prediction"], *_TORCH,
    *_of(f"gpytorch.{_NORMAL}", "__init__"),
    *_of(_LAZY, "representation_tree"),
    *_of(_STRATEGY, "__init__ num_train train_shape"),
    *_of("gpytorch.models.exact_prediction_strategies:", "prediction_strategy"),
    *_of("linear_operator.functions._matmul:", "Matmul"),
    *_of("linear_operator.functions._solve:", "Solve"),
    *_of(_OPERATOR, "_choose_root_method"),
    *_of(_TRIANGULAR, "inverse solve"),
)  # fmt: skip
"""How a distribution of new points is computed from a prior and a factor."""
FANTASY = (
    *PREDICTION, *_run["fantasy"],
    *_of(_STRATEGY, "get_fantasy_strategy"),
    *_of(f"{_OPERATORS}root_linear_operator:RootLinearOperator.", "__init__"),
    *_of(f"{_OPERATORS}chol_linear_operator:CholLinearOperator.", "__init__"),
    *_of("linear_operator.utils.pinverse:", "stable_pinverse"),
    *_of("linear_operator.utils.qr:", "stable_qr"),
)  # fmt: skip
"""How a fantasy grows from the caches of its model."""
MEMORY = (
    *_of("linear_operator.utils.memoize:",
         "_add_to_cache _cached _get_from_cache _is_in_cache add_to_cache clear_cache_hook"),
    *_of(_OPERATOR, "_args _kwargs evaluate_kernel representation representation_tree"),
    *_of(f"{_OPERATORS}linear_operator_representation_tree:LinearOperatorRepresentationTree.", "__call__"),
)  # fmt: skip
"""How operators are taken apart, and how results are kept on them."""
density: Relied = relied(*DENSITY)
prediction: Relied = relied(*PREDICTION)
fantasy: Relied = relied(*FANTASY)
