"""Kernels taken apart by exact type."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    CosineKernel,
    IndexKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PolynomialKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)

from autokern.gp import parts, small, tables
from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.small import Columns, Parameter

__all__ = ["FAMILIES", "Made", "called", "forwarded", "leaf"]

_MATERN = {0.5: "matern12", 1.5: "matern32", 2.5: "matern52"}


class _Place:
    """A kernel, and which columns of the points it takes: centred ones, or the points as they are."""

    def __init__(self, seen: Inspected, kernel: Any, columns: small.Array | None, dims: int) -> None:
        self.seen, self.kernel, self.dims, self._chosen = seen, kernel, dims, columns

    def columns(self) -> Columns:
        return slice(0, self.dims) if self._chosen is None else self._chosen

    def raw(self) -> Columns:
        """Return the columns of the points as they are, which lie behind the centred ones."""
        self.seen.raw = True
        total = self.seen.dims
        return slice(total, total + self.dims) if self._chosen is None else self._chosen + total

    def parameter(self, name: str, dims: int | None = None) -> Parameter:
        """Return a parameter ``(1, dims)`` or ``(1, 1)``."""
        raw = self.kernel._parameters.get(name)
        several = self.dims if dims is None else dims
        return self.seen.parameter(self.kernel, name, (1, 1 if raw is not None and raw.shape[-1:] == (1,) else several))

    def scale(self) -> Parameter:
        """Return the lengthscale."""
        return self.parameter("raw_lengthscale")

    def number(self, name: str) -> Parameter:
        """Return a parameter ``(1,)``."""
        return self.seen.parameter(self.kernel, name, (1,))


def _smooth(at: _Place, name: str, scale: Parameter) -> small.Part:
    return small.Leaf(small.FAMILIES[name], at.columns(), scale)


def _matern(at: _Place) -> small.Part:
    scale, name = at.scale(), _name(at.kernel)
    return parts.Rough(at.columns(), scale) if name == "matern12" else _smooth(at, name, scale)


def _polynomial(at: _Place) -> small.Part:
    power = at.seen.attribute(at.kernel, "power")
    if type(power) not in (int, float):
        raise UnreadError("a power that is no number")
    return parts.Polynomial(at.raw(), at.number("raw_offset"), power)


def _mixture(at: _Place) -> small.Part:
    names = "mixture_weights", "mixture_means", "mixture_scales"
    raw = at.kernel._parameters.get("raw_mixture_weights")
    count = 0 if raw is None else raw.shape[-1]
    weights = at.seen.parameter(at.kernel, "raw_mixture_weights", (count,))
    means, scales = (at.seen.parameter(at.kernel, f"raw_{name}", (count, 1, at.dims)) for name in names[1:])
    return parts.SpectralMixture(at.columns(), weights, means, scales)


def _positive_index(at: _Place) -> small.Part:
    unit, task = (at.seen.attribute(at.kernel, name) for name in ("unit_scale_for_target", "target_task_index"))
    if type(unit) is not bool or type(task) is not int:
        raise UnreadError("a unit or a task that is none")
    return _table(at, "raw_covar_factor", task if unit else None)


def _table(at: _Place, name: str, unit: int | None) -> small.Part:
    raw = at.kernel._parameters.get(name)
    shape = () if raw is None else tuple(raw.shape[len(at.seen.batch) :])
    if at.dims != 1 or len(shape) != 2:
        raise UnreadError("tasks of several columns, or a factor of another shape")
    column = at.raw()
    factor, variance = at.seen.parameter(at.kernel, name, shape), at.seen.parameter(at.kernel, "raw_var", shape[:1])
    made = tables.Index(column.start if isinstance(column, slice) else int(column[0]), factor, variance, unit)
    at.seen.tables[id(at.kernel)] = made
    return made


_READ: dict[type, tuple[str, Callable[[_Place], small.Part]]] = {
    RBFKernel: ("rbf", lambda at: _smooth(at, "rbf", at.scale())),
    MaternKernel: ("", _matern),
    RQKernel: ("rq", lambda at: parts.RationalQuadratic(at.columns(), at.scale(), at.number("raw_alpha"))),
    PeriodicKernel: (
        "periodic", lambda at: parts.Periodic(at.columns(), at.scale(), at.parameter("raw_period_length"))
    ),
    CosineKernel: ("cosine", lambda at: _smooth(at, "cosine", at.parameter("raw_period_length", 1))),
    LinearKernel: ("linear", lambda at: parts.Linear(at.raw(), at.parameter("raw_variance"))),
    PolynomialKernel: ("polynomial", _polynomial),
    ConstantKernel: ("constant", lambda at: tables.Constant(at.number("raw_constant"))),
    IndexKernel: ("index", lambda at: _table(at, "covar_factor", None)),
    SpectralMixtureKernel: ("mixture", _mixture),
}  # fmt: skip
_OF_BOTORCH: dict[str, tuple[str, str, Callable[[_Place], small.Part]]] = {
    "CategoricalKernel": (
        "botorch.models.kernels.categorical", "categorical", lambda at: tables.Categorical(at.raw(), at.scale())
    ),
    "PositiveIndexKernel": ("botorch.models.kernels.positive_index", "index", _positive_index),
}  # fmt: skip
"""By module and class, because BoTorch may not have been imported."""


FAMILIES = {name for name, _ in _READ.values()} | {name for _, name, _ in _OF_BOTORCH.values()} | {*_MATERN.values()}
"""The families of kernels that can be taken apart."""


def _name(kernel: Any) -> str:
    name = _MATERN.get(kernel.nu)
    if name is None:
        raise UnreadError("a Matérn kernel of another smoothness")
    return name


def leaf(seen: Inspected, kernel: Any, columns: small.Array | None, dims: int) -> small.Part:
    """Return the evaluation of a kernel without kernels in it, on the columns that were chosen."""
    kind = type(kernel)
    name, read = _READ.get(kind) or _of_botorch(kind)
    if kind is MaternKernel:
        seen.attribute(kernel, "nu")
        name = _name(kernel)
    if not dims and kind not in (RBFKernel, MaternKernel, ConstantKernel):
        raise UnreadError("a kernel of no dimensions")
    seen.families.append(name)
    return read(_Place(seen, kernel, columns, dims))


def _of_botorch(kind: type) -> tuple[str, Callable[[_Place], small.Part]]:
    module, *found = _OF_BOTORCH.get(kind.__name__, ("", "", _polynomial))
    if getattr(sys.modules.get(module), kind.__name__, None) is not kind:
        raise UnreadError(f"a kernel {kind.__name__}")
    return found[0], found[1]  # type: ignore[return-value]


class Made(NamedTuple):
    """What the evaluation of a kernel is made of."""

    leaf: Callable[[Inspected, Any, small.Array | None, int], Any]  # of a kernel on columns, None for so many
    scale: Callable[[Inspected, Any, Any], Any]  # of a ScaleKernel and the evaluation of its base
    sum: Callable[[Sequence[Any]], Any]
    product: Callable[[Sequence[Any]], Any]


def _scaled(seen: Inspected, kernel: Any, inner: small.Part) -> small.Part:
    return small.Scale(inner, seen.parameter(kernel, "raw_outputscale"))


_PARTS = Made(leaf, _scaled, small.Sum, small.Product)


def called(seen: Inspected, kernel: Any, columns: small.Array | None, dims: int, of: Made = _PARTS) -> Any:
    """Return the evaluation of a kernel that is called: on its active dimensions, of those chosen already.

    UnreadError where anything is not exactly known.
    """
    if kernel is None:
        raise UnreadError("no kernel")
    chosen = seen.chosen(kernel)
    if chosen is not None:
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < dims:
            raise UnreadError("active dimensions that there are not")
        columns, dims = (chosen if columns is None else columns[chosen]), len(chosen)
    return forwarded(seen, kernel, columns, dims, of)


def forwarded(seen: Inspected, kernel: Any, columns: small.Array | None, dims: int, of: Made = _PARTS) -> Any:
    """Return the evaluation of a kernel's `forward`, which chooses no dimensions."""
    kind = type(kernel)
    seen.attribute(kernel, "_batch_shape")
    if kernel.batch_shape != seen.batch:
        raise UnreadError("a kernel with another batch")
    if kind is ScaleKernel:
        return of.scale(seen, kernel, forwarded(seen, seen.module(kernel, "base_kernel"), columns, dims, of))
    if kind not in (AdditiveKernel, ProductKernel):
        return of.leaf(seen, kernel, columns, dims)
    several = seen.module(kernel, "kernels")
    children = [called(seen, seen.module(several, name), columns, dims, of) for name in several._modules]
    if not children:
        raise UnreadError("a sum or product of nothing")
    return of.sum(children) if kind is AdditiveKernel else of.product(children)
