"""Recognises plain `forward` methods of exact models, which only return mean and covariance of the points.

A method is plain if its bytecode equals that of a template below, up to the names of variables and modules.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import gpytorch
from gpytorch.distributions import MultivariateNormal


def _qualified(self: Any, x: Any) -> Any:
    mean = self.mean_module(x)
    covariance = self.covar_module(x)
    return gpytorch.distributions.MultivariateNormal(mean, covariance)


def _by_name(self: Any, x: Any) -> Any:
    mean = self.mean_module(x)
    covariance = self.covar_module(x)
    return MultivariateNormal(mean, covariance)


def _qualified_at_once(self: Any, x: Any) -> Any:
    return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _at_once(self: Any, x: Any) -> Any:
    return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _transformed(self: Any, x: Any) -> Any:
    if self.training:
        x = self.transform_inputs(x)
    mean = self.mean_module(x)
    covariance = self.covar_module(x)
    return MultivariateNormal(mean, covariance)


_FLAGS = 0xFFFF  # higher bits are those of `from __future__ import ...`
_TEMPLATES = (_qualified, _by_name, _qualified_at_once, _at_once, _transformed)


def modules_of(forward: Callable[..., Any]) -> tuple[str, str, bool] | None:
    """Return the names of a plain method's mean and kernel, and whether it transforms inputs; None if not plain."""
    if not isinstance(forward, types.FunctionType) or forward.__closure__ or forward.__defaults__:
        return None
    code = forward.__code__
    for template in _TEMPLATES:
        model = template.__code__
        same = (code.co_code, code.co_argcount, code.co_flags & _FLAGS, len(code.co_names)) == (
            model.co_code, model.co_argcount, model.co_flags & _FLAGS, len(model.co_names)
        )  # fmt: skip
        if same and (names := _matched(template, model.co_names, code.co_names, forward.__globals__)) is not None:
            return names
    return None


def _matched(
    template: Callable[..., Any], expected: tuple[str, ...], found: tuple[str, ...], space: dict[str, Any]
) -> tuple[str, str, bool] | None:
    """Return the result of `modules_of` if the method's global and fixed names are those of the template."""
    names = dict(zip(expected, found, strict=True))
    root = "gpytorch" if "gpytorch" in names else "MultivariateNormal"
    if space.get(names[root]) is not (gpytorch if root == "gpytorch" else MultivariateNormal):
        return None
    fixed = {"distributions", "MultivariateNormal", "training", "transform_inputs"} - {root}
    if any(names.get(name, name) != name for name in fixed):
        return None
    return names["mean_module"], names["covar_module"], template is _transformed
