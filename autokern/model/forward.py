"""The parts of a model by its `forward` method: the names of its mean and of its kernel, or of the kernels it adds.

A `forward` method is plain, which only returns the mean of the points and a kernel's covariance or the sum of several,
if its bytecode equals that of a template below, up to the names of variables and modules.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import gpytorch
from gpytorch.distributions import MultivariateNormal

from autokern.model import joint
from autokern.model.arrays import Inspected, UnreadError

_MOST_KERNELS = 6  # kernels that a `forward` method adds
_BAYESIAN = "botorch.models.fully_bayesian"
_FUNCTIONS = ("forward", "_split_inputs", "_map_tasks")


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
    """Return the kernel of a model, or the sum of its kernels (`joint`), None if it was not fitted; or UnreadError."""
    kernels = [seen.module(model, name) for name in names]
    if len(kernels) == 1 or None in kernels:
        return kernels[0]
    found = joint.of_kernels(model, kernels)
    if found is None:
        raise UnreadError("a sum of kernels of different batch shapes, or twice of one kernel")
    return found


def is_mapping(kind: type) -> bool:
    """Whether a model class computes as BoTorch's `MultiTaskGP` does."""
    known = getattr(sys.modules.get("botorch.models.multitask"), "MultiTaskGP", None)
    return known is not None and all(getattr(kind, name, None) is getattr(known, name) for name in _FUNCTIONS)
