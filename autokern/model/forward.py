"""The parts of a model by its `forward` method: its mean and its kernel, or one kernel in place of several it adds.

A `forward` method is plain, which only returns the mean of the points and a kernel's covariance or the sum of several,
if its bytecode equals that of a template below, up to the names of variables and modules.

For ``self.trend(x) + self.season(x)``, the library adds lazy matrices, each with its own columns of the points. Their
sum is the matrix of an `AdditiveKernel` of the same kernels at all columns, which is what the rest of autokern reads.
The sum itself stays as it is.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import AdditiveKernel, Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator.operators import DenseLinearOperator, SumLinearOperator
from linear_operator.utils.memoize import add_to_cache

from autokern.core.errors import unless_it_fails
from autokern.core.state import Beside
from autokern.model.arrays import Inspected, UnreadError
from autokern.model.marginal import is_plain
from autokern.model.memoized import EVALUATED, TERMS, is_kept

_MOST_KERNELS = 6  # kernels that a `forward` method adds
_BAYESIAN = "botorch.models.fully_bayesian"
_FUNCTIONS = ("forward", "_split_inputs", "_map_tasks")

_known: Beside[AdditiveKernel] = Beside()  # by model
_wholes: Beside[LazyEvaluatedKernelTensor] = Beside()  # by sum of covariances


def _transformed(self: Any, x: Any) -> Any:
    if self.training:
        x = self.transform_inputs(x)
    mean = self.mean_module(x)
    covariance = self.kernel_0(x)
    return MultivariateNormal(mean, covariance)


def _fitted(self: Any, x: Any) -> Any:
    self._check_if_fitted()
    if self.training:
        x = self.transform_inputs(X=x)
    mean = self.mean_module(x)
    covariance = self.kernel_0(x)
    return MultivariateNormal(mean, covariance)


def _compared(code: types.CodeType) -> tuple[Any, ...]:
    flags = code.co_flags & 0xFFFF  # higher bits are those of `from __future__ import ...`
    return code.co_code, code.co_argcount, flags, len(code.co_names)


def _sums() -> Iterator[Callable[..., Any]]:
    """Return methods that compute a mean, and one kernel or the sum of several."""
    for count, of in itertools.product(range(1, _MOST_KERNELS + 1), ("gpytorch.distributions.", "")):
        kernels = " + ".join(f"self.kernel_{i}(x)" for i in range(count))
        made: dict[str, Any] = {}
        exec(
            f"def apart(self, x):\n m = self.mean_module(x)\n k = {kernels}\n return {of}MultivariateNormal(m, k)\n"
            f"def at_once(self, x):\n return {of}MultivariateNormal(self.mean_module(x), {kernels})\n",
            made,
        )
        yield from (made["apart"], made["at_once"])


_TEMPLATES = {_compared(template.__code__): template.__code__ for template in (_transformed, _fitted, *_sums())}


def _modules_of(forward: Callable[..., Any]) -> tuple[str, list[str], bool] | None:
    """Return the names of a plain method's mean and kernels, and whether it transforms inputs; None if not plain."""
    if not isinstance(forward, types.FunctionType) or forward.__closure__ or forward.__defaults__:
        return None
    template = _TEMPLATES.get(_compared(forward.__code__))
    if template is None:
        return None
    names = dict(zip(template.co_names, forward.__code__.co_names, strict=True))
    root, known = ("gpytorch", gpytorch) if "gpytorch" in names else ("MultivariateNormal", MultivariateNormal)
    fixed = {"_check_if_fitted", "distributions", "MultivariateNormal", "training", "transform_inputs"} - {root}
    if forward.__globals__.get(names[root]) is not known or any(names.get(name, name) != name for name in fixed):
        return None
    kernels = [name for of, name in names.items() if of.startswith("kernel_")]
    return names["mean_module"], kernels, "training" in names


def parts_of(kind: Any) -> tuple[str, list[str], bool]:
    """Return the names of a model class's mean and kernels, and whether `forward` transforms inputs; or UnreadError."""
    names = ("mean_module", ["covar_module"], True) if is_mapping(kind) else _modules_of(kind.forward)
    check = getattr(getattr(kind, "_check_if_fitted", None), "__module__", _BAYESIAN)
    if names is None or any(hasattr(kind, name) for name in (names[0], *names[1])) or check != _BAYESIAN:
        raise UnreadError("a forward method that is not plain")
    return names


def kernel_at(seen: Inspected, model: Any, names: list[str]) -> Any:
    """Return the kernel of a model, or the sum of its kernels, None if it was not fitted; or UnreadError."""
    kernels = [seen.module(model, name) for name in names]
    if len(kernels) == 1 or None in kernels:
        return kernels[0]
    found = of_kernels(model, kernels)
    if found is None:
        raise UnreadError("a sum of kernels of different batch shapes, or twice of one kernel")
    return found


def is_mapping(kind: type) -> bool:
    """Whether a model class computes as BoTorch's `MultiTaskGP` does."""
    known = getattr(sys.modules.get("botorch.models.multitask"), "MultiTaskGP", None)
    return known is not None and all(getattr(kind, name, None) is getattr(known, name) for name in _FUNCTIONS)


def joined(model: Any, prior: Any) -> Any:
    """Return a training prior with one lazy covariance in place of a sum of such; any other prior itself."""
    if type(prior) is not MultivariateNormal:
        return prior
    covariance = prior.__dict__.get("_covar")
    whole = joined_covariance(model, covariance, None)
    return prior if whole is covariance else MultivariateNormal(prior.loc, whole)


def joined_covariance(model: Any, covariance: Any, x: torch.Tensor | None) -> Any:
    """Return one lazy matrix for a sum of such at points `x`, by default those of training, else the covariance."""
    if covariance.__class__ is not SumLinearOperator:
        return covariance
    return _whole(model, covariance, x) or covariance


def whole_of(covariance: Any) -> Any:
    """Return the lazy matrix by which `joined_covariance` has replaced a sum, else the covariance itself."""
    return _wholes.get(covariance) or covariance


@unless_it_fails
def _whole(model: Any, covariance: Any, x: torch.Tensor | None) -> LazyEvaluatedKernelTensor | None:
    terms = list(_terms(covariance))
    if not all(map(is_plain, terms)):
        return None
    points = model.train_inputs[0] if x is None else x
    points = next((term.x1 for term in terms if term.kernel.active_dims is None), points)
    kernel = of_kernels(model, [term.kernel for term in terms]) if all(_is_at(term, points) for term in terms) else None
    if kernel is None:
        return None
    found = LazyEvaluatedKernelTensor(points, points, kernel=kernel)
    found.__dict__[TERMS] = terms
    return _wholes.put(covariance, found)


def _terms(covariance: Any) -> Iterator[Any]:
    for term in covariance.linear_ops:
        if term.__class__ is SumLinearOperator:
            yield from _terms(term)
        else:
            yield term


def _is_at(term: Any, x: torch.Tensor) -> bool:
    """Whether a lazy matrix is that of its kernel at these points."""
    columns = term.kernel.active_dims
    if columns is None:
        return term.x1 is x
    if x.requires_grad or term.x1.requires_grad:  # equal numbers may be those of another graph
        return False
    own = x.index_select(-1, columns)
    return own.shape == term.x1.shape and torch.equal(own, term.x1)


def of_kernels(model: Any, kernels: Sequence[Kernel]) -> AdditiveKernel | None:
    """Return the sum of a model's kernels, the same object for the same kernels; None for an unsupported sum."""
    known, present = _known.get(model), [*map(id, kernels)]
    if known is None or [*map(id, known.kernels)] != present:
        if len({*present}) < len(present) or len({kernel.batch_shape for kernel in kernels}) > 1:
            return None
        known = _known.put(model, AdditiveKernel(*kernels))
    return known


def evaluated(lazy: Any) -> Any:
    """Return an evaluated covariance; each term of a sum is evaluated and cached, as in the library."""
    terms = lazy.__dict__.get(TERMS)
    if terms is None or is_kept(lazy, EVALUATED):
        return lazy.evaluate_kernel()
    found = [term.evaluate_kernel() for term in terms]
    dense = all(type(one) is DenseLinearOperator for one in found)
    whole = DenseLinearOperator(sum(one.tensor for one in found)) if dense else SumLinearOperator(*found)
    return add_to_cache(lazy, EVALUATED, whole)
