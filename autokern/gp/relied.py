"""What densities, predictions and fantasies rely on in the libraries, beside the classes that a model consists of.

Found by what the libraries run without autokern and do not run with it.
"""

from __future__ import annotations

from autokern.core.known import Relied, relied

__all__ = ["ALGEBRA", "DENSITY", "MEMORY", "PREDICTION", "density", "fantasy", "prediction"]


def _of(place: str, names: str) -> tuple[str, ...]:
    """Return full names from a module, with a class or not, and the names in it."""
    return tuple(f"{place}{name}" for name in names.split())


_OPERATORS = "linear_operator.operators."
ALGEBRA = (
    *_of("linear_operator.utils.cholesky:", "psd_safe_cholesky _psd_safe_cholesky"),
    *_of(
        f"{_OPERATORS}_linear_operator:LinearOperator.",
        "__add__ __mul__ _args _cholesky _kwargs _mul_matrix add_diagonal batch_shape cholesky evaluate_kernel "
        "inv_quad_logdet mul representation representation_tree size to_dense",
    ),
    *_of(f"{_OPERATORS}added_diag_linear_operator:AddedDiagLinearOperator.", "__init__ evaluate_kernel"),
    *_of(
        f"{_OPERATORS}dense_linear_operator:DenseLinearOperator.",
        "__add__ __init__ _cholesky_solve _diagonal _size to_dense",
    ),
    *_of(f"{_OPERATORS}dense_linear_operator:", "to_linear_operator"),
    *_of(f"{_OPERATORS}_linear_operator:", "to_dense"),
    *_of(f"{_OPERATORS}diag_linear_operator:ConstantDiagLinearOperator.", "_diag _size"),
    *_of(f"{_OPERATORS}diag_linear_operator:DiagLinearOperator.", "to_dense"),
    *_of(f"{_OPERATORS}linear_operator_representation_tree:LinearOperatorRepresentationTree.", "__call__"),
    *_of(f"{_OPERATORS}zero_linear_operator:ZeroLinearOperator.", "__add__"),
    *_of("gpytorch.module:", "_validate_module_outputs"),
    *_of("torch.distributions.utils:lazy_property.", "__get__"),
    *_of("torch.distributions.multivariate_normal:MultivariateNormal.", "mean"),
    *_of(f"{_OPERATORS}sum_linear_operator:SumLinearOperator.", "__init__ to_dense"),
    *_of(f"{_OPERATORS}root_linear_operator:RootLinearOperator.", "to_dense"),
    *_of(f"{_OPERATORS}triangular_linear_operator:TriangularLinearOperator.", "__init__ _cholesky_solve to_dense"),
    *_of(f"{_OPERATORS}chol_linear_operator:CholLinearOperator.", "_chol_diag inv_quad_logdet"),
    *_of("linear_operator.utils.memoize:", "_add_to_cache _cached _is_in_cache"),
)
"""How a covariance is formed and factorised."""
DENSITY = (
    *ALGEBRA,
    *_of("gpytorch.distributions.multivariate_normal:MultivariateNormal.",
         "_unbroadcasted_scale_tril lazy_covariance_matrix log_prob"),
    *_of("torch.distributions.multivariate_normal:MultivariateNormal.", "log_prob"),
    *_of("torch.distributions.multivariate_normal:", "_batch_mahalanobis"),
    *_of("gpytorch.lazy.lazy_evaluated_kernel_tensor:LazyEvaluatedKernelTensor.",
         "evaluate_kernel representation representation_tree"),
    *_of("gpytorch.mlls.exact_marginal_log_likelihood:ExactMarginalLogLikelihood.", "_add_other_terms forward"),
    *_of("gpytorch.module:", "_extract_named_added_loss_terms _extract_named_priors"),
    *_of("torch.nn.functional:", "softplus"),
    *_of("torch:", "exp sigmoid"),
)  # fmt: skip
"""How a marginal likelihood is computed from a prior."""
PREDICTION = (
    *ALGEBRA,
    *_of(
        "gpytorch.models.exact_prediction_strategies:DefaultPredictionStrategy.",
        "__init__ _exact_predictive_covar_inv_quad_form_cache _exact_predictive_covar_inv_quad_form_root _mean_cache "
        "covar_cache exact_prediction exact_predictive_covar exact_predictive_mean mean_cache "
        "num_train train_shape",
    ),
    *_of("gpytorch.models.exact_prediction_strategies:", "prediction_strategy"),
    *_of("gpytorch.models.exact_gp:ExactGP.",
         "__call__ _get_test_prior_mean_and_covariances _get_train_prior_distribution train_targets"),
    *_of("gpytorch.lazy.lazy_evaluated_kernel_tensor:LazyEvaluatedKernelTensor.",
         "__getitem__ _getitem evaluate_kernel representation representation_tree"),
    *_of("gpytorch.distributions.multivariate_normal:MultivariateNormal.", "__init__ lazy_covariance_matrix"),
    *_of("linear_operator.functions._solve:", "Solve _solve"),
    *_of("linear_operator.functions._matmul:", "Matmul"),
    *_of(f"{_OPERATORS}_linear_operator:LinearOperator.",
         "_choose_root_method detach matmul root_decomposition root_inv_decomposition solve"),
    *_of(f"{_OPERATORS}dense_linear_operator:DenseLinearOperator.", "_matmul"),
    *_of(f"{_OPERATORS}triangular_linear_operator:TriangularLinearOperator.", "_matmul inverse solve"),
    *_of("torch.nn.functional:", "softplus"),
    *_of("torch:", "exp sigmoid"),
)  # fmt: skip
"""How a distribution of new points is computed from a prior and a factor."""
FANTASY = (
    *PREDICTION,
    *_of("gpytorch.models.exact_prediction_strategies:DefaultPredictionStrategy.", "get_fantasy_strategy"),
    *_of(f"{_OPERATORS}_linear_operator:LinearOperator.", "__sub__ _t_matmul cat_rows mT transpose"),
    *_of(f"{_OPERATORS}root_linear_operator:RootLinearOperator.", "__init__ _matmul"),
    *_of(f"{_OPERATORS}chol_linear_operator:CholLinearOperator.", "__init__"),
    *_of("linear_operator.utils.pinverse:", "stable_pinverse"),
    *_of("linear_operator.utils.qr:", "stable_qr"),
)  # fmt: skip
"""How a fantasy grows from the caches of its model."""
MEMORY = (
    *_of("linear_operator.utils.memoize:",
         "_add_to_cache _cached _get_from_cache _is_in_cache add_to_cache clear_cache_hook"),
    *_of(f"{_OPERATORS}_linear_operator:LinearOperator.",
         "_args _kwargs evaluate_kernel representation representation_tree"),
    *_of(f"{_OPERATORS}linear_operator_representation_tree:LinearOperatorRepresentationTree.", "__call__"),
)  # fmt: skip
"""How operators are taken apart, and how results are kept on them."""
density: Relied = relied(*DENSITY)
prediction: Relied = relied(*PREDICTION)
fantasy: Relied = relied(*FANTASY)
