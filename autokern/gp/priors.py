"""Log densities of gpytorch's priors and their derivatives, by arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods.noise_models import HomoskedasticNoise
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior
from scipy import special

from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.small import Array, Parameter

__all__ = ["Term", "term"]

_HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)
_PRIORED = {
    ("Kernel._lengthscale_param", Kernel): "raw_lengthscale",
    ("ScaleKernel._outputscale_param", ScaleKernel): "raw_outputscale",
    ("_HomoskedasticNoiseBase._noise_param", HomoskedasticNoise): "raw_noise",
    ("ConstantMean._constant_param", ConstantMean): "raw_constant",
}
"""The raw parameter that the libraries' own closures of priors read, by closure and class."""


class Term(NamedTuple):
    """The log density of a prior at the values of a parameter."""

    parameter: Parameter
    at: Callable[[Array], tuple[float, Array]]


def term(seen: Inspected, module: torch.nn.Module, prior: Any, closure: Any) -> Term:
    """Return the term of a prior that is registered on a module with a closure of the library's own."""
    function = getattr(closure, "__func__", None)
    raw = next(
        (name for (path, kind), name in _PRIORED.items()
         if isinstance(module, kind) and function is not None and function is _closure(path, kind)),
        None,
    )  # fmt: skip
    tensor = None if raw is None else module._parameters.get(raw)
    known = seen.present(tensor)
    if known is None:
        raise UnreadError("a prior of something else")
    seen.attribute(prior, "_transform")
    if prior._transform is not None or "_transform" in prior._modules:
        raise UnreadError("a prior with a transform")
    kind = type(prior)
    if kind is LogNormalPrior:
        base = seen.attribute(prior, "base_dist")
        return Term(known, _log_normal(*(seen.constant(seen.attribute(base, name)) for name in ("loc", "scale"))))
    if kind is NormalPrior:
        return Term(known, _normal(*(seen.constant(seen.buffer(prior, name)) for name in ("loc", "scale"))))
    if kind is GammaPrior:
        return Term(known, _gamma(*(seen.constant(seen.buffer(prior, name)) for name in ("concentration", "rate"))))
    raise UnreadError(f"a prior {kind.__name__}")


def _closure(path: str, kind: type) -> Any:
    return getattr(kind, path.partition(".")[2])


def _normal(loc: Array, scale: Array) -> Callable[[Array], tuple[float, Array]]:
    """As torch has it: what is computed from the scale alone keeps its dtype."""

    def at(value: Array) -> tuple[float, Array]:
        gap, width = (value - loc).ravel(), scale[()]
        variance, constant = float(width * width), float(np.log(width)) + _HALF_LOG_2_PI
        return float(gap @ gap) / (-2.0 * variance) - gap.size * constant, (gap / -variance).reshape(value.shape)

    return at


def _log_normal(loc: Array, scale: Array) -> Callable[[Array], tuple[float, Array]]:
    of_log = _normal(loc, scale)

    def at(value: Array) -> tuple[float, Array]:
        log = np.log(value)
        found, slope = of_log(log)
        return found - float(np.add.reduce(log, axis=None)), (slope - 1.0) / value

    return at


def _gamma(shape: Array, rate: Array) -> Callable[[Array], tuple[float, Array]]:
    def at(value: Array) -> tuple[float, Array]:
        constant = float(shape * np.log(rate) - special.gammaln(shape))
        log = (shape - 1.0) * np.log(value) - rate * value
        return float(np.add.reduce(log, axis=None)) + value.size * constant, (shape - 1.0) / value - rate

    return at
