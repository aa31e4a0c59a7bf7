"""Log densities of gpytorch's priors and their derivatives, in NumPy."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch import priors as theirs
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.module import Module

from autokern.kernels.array_parts import Array, Correlations
from autokern.model.arrays import Inspected, UnreadError
from autokern.model.parameters import Element

_HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)

_LOGARITHM = tuple(
    f"torch.distributions.{name}"
    for name in (
        "normal:Normal.log_prob", "transforms:ExpTransform._inverse", "transforms:ExpTransform.log_abs_det_jacobian",
        "transforms:Transform._inv_call", "transforms:_InverseTransform.__call__", "utils:_sum_rightmost",
    )
)  # fmt: skip
"""The code by which torch transforms a normal density to a log-normal one."""

Found = tuple[Array, Array]  # log densities of a parameter's values, and their derivatives
At = Callable[[Array], Found]


class Term(NamedTuple):
    """A prior's log density, and the parameter, or quantity computed from parameters, that it applies to."""

    parameter: Any
    at: At


def term(seen: Inspected, module: Any, prior: Any, closure: Any) -> Term:
    """Return the term of a prior on a module's property; UnreadError for an unsupported prior or closure."""
    known: Any = None
    owner, name = module, _property(module, closure)
    if name == "noise" and type(owner) is GaussianLikelihood:
        owner = seen.module(owner, "noise_covar")
    if name == "_lower_triangle_corr" and id(owner) in seen.tables and not seen.batch:
        known = Correlations(seen.tables[id(owner)], len(owner.raw_var))
    elif isinstance(getattr(type(owner), name, None), property):  # a property `name` has the parameter `raw_name`
        known = seen.present(owner._parameters.get(f"raw_{name}"))
    if known is None:
        raise UnreadError("a prior on an unsupported property")
    if type(prior) is theirs.SmoothedBoxPrior and type(known) is Element and known.lone:
        raise UnreadError("a prior that sums over the models of a batch")
    seen.attribute(prior, "_transform")
    if prior._transform is not None or "_transform" in prior._modules:
        raise UnreadError("a prior with a transform")
    own = prior.__dict__
    for owner in (prior, own.get("base_dist"), own.get("_dirichlet"), prior._modules.get("tails")):
        if owner is not None:
            seen.relies(type(owner))
    return Term(known, _density(seen, prior))


def _property(module: Any, closure: Any) -> str:
    """Return the name of the only property that a closure reads, "" for any other closure."""
    function = getattr(closure, "__func__", None)
    if function is not None:
        name: str = function.__name__  # the library's own, such as `_lengthscale_param`
        return name[1:-6] if name.endswith("_param") and getattr(type(module), name, None) is function else ""
    if type(closure) is not types.FunctionType or closure.__defaults__:
        return ""
    code, space = closure.__code__, closure.__closure__ or ()
    if code in Module.register_prior.__code__.co_consts and len(space) == 1:
        found = space[0].cell_contents
        return found if isinstance(found, str) else ""
    plain = (code.co_code, code.co_argcount) == (_PLAIN.co_code, 1) and len(code.co_names) == 1 and not space
    return code.co_names[0] if plain else ""


_PLAIN = (lambda module: module.value).__code__


def _density(seen: Inspected, prior: Any) -> At:
    """Return the log density of a prior as a function of values."""
    kind = type(prior)
    made = _MADE.get(kind) or _MADE.get(f"{kind.__module__}:{kind.__qualname__}")
    if made is None:
        raise UnreadError(f"a prior {kind.__name__}")
    density, compute, inner, names, shape = made
    if kind is theirs.LogNormalPrior:
        seen.relies(*_LOGARITHM)
    if kind is theirs.GammaPrior and prior.rate.dtype is not seen.dtype:  # torch rounds the value to the rate's dtype
        raise UnreadError("a gamma prior in another precision")
    owners = [seen.attribute(prior, inner) if inner else prior] * len(names)
    if kind is theirs.SmoothedBoxPrior:
        owners[3:] = [seen.module(prior, "tails")] * 2
    numbers = [
        seen.buffer(owner, name) if name in getattr(owner, "_buffers", ()) else seen.attribute(owner, name)
        for owner, name in zip(owners, names, strict=True)
    ]
    arrays = [seen.constant(number, shape) for number in numbers]
    constant = functools.lru_cache(1)(lambda *_: compute(*map(torch.from_numpy, arrays)))
    return lambda value: density(value, constant(*[array.tobytes() for array in arrays]), *arrays)


def _normal(value: Array, constant: float, loc: Array, scale: Array) -> Found:
    gap = value - loc
    slope = gap / -float(scale * scale)
    return 0.5 * gap * slope - constant, slope


def _log_normal(value: Array, constant: float, loc: Array, scale: Array) -> Found:
    log = np.log(value)
    found, slope = _normal(log, constant, loc, scale)
    return found - log, (slope - 1.0) / value


def _half_normal(value: Array, constant: float, loc: Array, scale: Array) -> Found:
    found, slope = _normal(value, constant, loc, scale)
    return np.where(value >= 0.0, found + math.log(2.0), -np.inf), slope


def _gamma(value: Array, constant: float, shape: Array, rate: Array) -> Found:
    return (shape - 1.0) * np.log(value) - rate * value + constant, (shape - 1.0) / value - rate


def _uniform(value: Array, constant: float, low: Array, high: Array) -> Found:
    return np.where((low <= value) & (value < high), -constant, -np.inf), np.zeros_like(value)


def _smoothed_box(
    value: Array, constants: tuple[float, float], low: Array, high: Array, sigma: Array, loc: Array, scale: Array
) -> Found:
    gap = value - (low + high) / 2
    over = np.abs(gap) - (high - low) / 2
    found, slope = _normal(np.maximum(over, 0.0), constants[0], loc.reshape(()), scale.reshape(()))
    return found - constants[1], np.where(over >= 0.0, slope * np.sign(gap), 0.0).reshape(value.shape)


def _beta(value: Array, constant: float, concentration: Array) -> Found:
    more = concentration - 1.0
    log = more[0] * np.log(value) + more[1] * np.log1p(-value)
    return log + constant, more[0] / value - more[1] / (1.0 - value)


def _of_normal(loc: torch.Tensor, scale: torch.Tensor) -> float:
    return float(scale.log()) + _HALF_LOG_2_PI


def _of_gamma(shape: torch.Tensor, rate: torch.Tensor) -> float:
    return float(torch.xlogy(shape, rate)) - float(shape.lgamma())


def _of_box(a: Any, b: Any, sigma: Any, loc: torch.Tensor, scale: torch.Tensor) -> tuple[float, float]:
    return _of_normal(loc, scale), float((1 + (b - a) / (math.sqrt(2 * math.pi) * sigma)).log())


def _of_beta(concentration: torch.Tensor) -> float:
    return float(concentration.sum().lgamma()) - float(concentration.lgamma().sum())


_MADE: dict[type | str, Any] = {
    theirs.LogNormalPrior: (_log_normal, _of_normal, "base_dist", ("loc", "scale"), ()),
    theirs.NormalPrior: (_normal, _of_normal, "", ("loc", "scale"), ()),
    theirs.GammaPrior: (_gamma, _of_gamma, "", ("concentration", "rate"), ()),
    theirs.HalfNormalPrior: (_half_normal, _of_normal, "base_dist", ("loc", "scale"), ()),
    theirs.UniformPrior: (_uniform, lambda low, high: float((high - low).log()), "", ("low", "high"), ()),
    theirs.SmoothedBoxPrior: (_smoothed_box, _of_box, "", ("a", "b", "sigma", "loc", "scale"), (1,)),
    "botorch.models.utils.priors:BetaPrior": (_beta, _of_beta, "_dirichlet", ("concentration",), (2,)),
}
"""For each class, or its name, as BoTorch may not be imported: the density as a function of values, a constant and the
prior's arguments; the constant, computed by torch when an argument changes; the attribute that holds the arguments,
their names and their shape."""
