"""Converts gpytorch kernels, recognised by exact type, into parts that NumPy evaluates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from gpytorch import kernels

from autokern.kernels import array_distances as points
from autokern.kernels import array_formulas as formulas
from autokern.kernels import array_parts as parts
from autokern.kernels.array_distances import Distances, Mapped, Products, Rough, Sums
from autokern.kernels.array_formulas import SpectralMixture
from autokern.kernels.array_parts import Array, Columns, Parameter, Part, Product, Scale, Sum
from autokern.kernels.family import formula_of
from autokern.model.arrays import Inspected, UnreadError


class _Place:
    """A kernel and the columns of the points that it reads, centred or raw."""

    def __init__(self, seen: Inspected, kernel: Any, chosen: Array) -> None:
        self.seen, self.kernel, self.dims, self.chosen = seen, kernel, len(chosen), chosen

    def columns(self, start: int = 0) -> Columns:
        chosen = self.chosen
        if len(chosen) and (np.diff(chosen) == 1).all():
            return slice(start + int(chosen[0]), start + int(chosen[-1]) + 1)
        return chosen + start

    def raw(self) -> Columns:
        """Return the columns of the uncentred points, which follow the centred ones."""
        self.seen.raw = True
        return self.columns(self.seen.dims)

    def parameter(self, name: str = "raw_lengthscale") -> Parameter:
        """Return a parameter ``(1, dims)`` or ``(1, 1)``, by default the lengthscale."""
        several = self.kernel.ard_num_dims or 1
        if several not in (1, self.dims):
            raise UnreadError(f"{several} lengthscales of {self.dims} dimensions")
        return self.seen.parameter(self.kernel, name, (1, several))

    def number(self, name: str) -> Parameter:
        """Return a parameter ``(1,)``."""
        return self.seen.parameter(self.kernel, name, (1,))


def _distances(at: _Place, name: str, scale: Parameter) -> Part:
    kind = Rough if name == "matern12" else Distances
    return kind(Mapped(at.columns(), points.scaled, scale), formulas.FORMULAS[name])


def _matern(at: _Place) -> Part:
    at.seen.attribute(at.kernel, "nu")
    found = formula_of(at.kernel)
    if found is None:
        raise UnreadError("a Matérn kernel of an unsupported nu, or with overridden methods")
    at.seen.families.append(found.name)
    return _distances(at, found.name, at.parameter())


def _periodic(at: _Place) -> Part:
    period = at.parameter("raw_period_length")
    return Distances(Mapped(at.columns(), points.circled, at.parameter(), period), formulas.FORMULAS["rbf"])


def _rational(at: _Place) -> Part:
    alpha = at.number("raw_alpha")
    return Distances(Mapped(at.columns(), points.scaled, at.parameter()), formulas.rational, alpha)


def _piecewise(at: _Place) -> Part:
    q = at.seen.attribute(at.kernel, "q")
    if type(q) is not int or q not in (1, 2, 3):
        raise UnreadError("a piecewise polynomial whose q is not 1, 2 or 3")
    at.seen.relies(*(f"{kernels.PiecewisePolynomialKernel.__module__}:{name}" for name in ("_fmax", "_get_cov")))
    return Distances(Mapped(at.columns(), points.scaled, at.parameter()), formulas.piecewise(at.dims, q))


def _polynomial(at: _Place) -> Part:
    power = at.seen.attribute(at.kernel, "power")
    if type(power) not in (int, float):
        raise UnreadError("a power that is no number")
    offset = at.number("raw_offset")
    return Products(Mapped(at.raw()), functools.partial(formulas.polynomial, power=power), offset)


def _truncated(at: _Place) -> Part:
    own, named, power = at.seen.attribute(at.kernel, "fidelity_dims"), range(at.dims), at.number("raw_power")
    at.seen.stays(own.__repr__)
    rest = [i for i in named if i not in own]
    if not (rest and 0 < len(own) <= 2 and set(own) <= set(named)):
        raise UnreadError("fidelities that are no columns, or nothing else")

    def term(dims: list[int]) -> Part:
        alike, *gaps = [_Place(at.seen, at.kernel, at.chosen[of]).raw() for of in (dims, *([i] for i in dims))]
        product = Products(Mapped(alike, points.clamped), formulas.powered, power)
        return Product([product, *(Products(Mapped(one, points.short), formulas.linear) for one in gaps)])

    terms = [*([i] for i in own), [*own]][: 2 * len(own) - 1]
    free, bias = (
        called(at.seen, at.seen.module(at.kernel, f"covar_module_{name}"), at.chosen[rest])
        for name in ("unbiased", "biased")
    )
    return Sum([free, Product([Sum([*map(term, terms)]), bias])])


def _of_one(at: _Place, part: Part) -> Part:
    """Return a part of one column, to which an offset is added."""
    if at.dims != 1:
        raise UnreadError("a fidelity of several columns")
    return Sum([part, parts.Constant(at.number("raw_offset"))])


def _decay(at: _Place) -> Part:
    scaled, power = Mapped(at.raw(), points.scaled, at.parameter()), at.number("raw_power")
    return _of_one(at, Sums(scaled, functools.partial(formulas.powered, sign=-1.0), power))


def _mixture(at: _Place) -> Part:
    raw = at.kernel._parameters.get("raw_mixture_weights")
    count = 0 if raw is None else raw.shape[-1]
    weights = at.seen.parameter(at.kernel, "raw_mixture_weights", (count,))
    means, scales = (at.seen.parameter(at.kernel, f"raw_mixture_{s}", (count, 1, at.dims)) for s in ("means", "scales"))
    return SpectralMixture(at.columns(), weights, means, scales)


def _positive_index(at: _Place) -> Part:
    unit, task = (at.seen.attribute(at.kernel, name) for name in ("unit_scale_for_target", "target_task_index"))
    if type(unit) is not bool or type(task) is not int:
        raise UnreadError("unit_scale_for_target or target_task_index of another type")
    return _table(at, "raw_covar_factor", task if unit else None)


def _table(at: _Place, name: str, unit: int | None) -> Part:
    raw = at.kernel._parameters.get(name)
    shape = () if raw is None else tuple(raw.shape[len(at.seen.batch) :])
    if at.dims != 1 or len(shape) != 2:
        raise UnreadError("tasks of several columns, or a factor of another shape")
    column = at.raw()
    factor, variance = at.seen.parameter(at.kernel, name, shape), at.seen.parameter(at.kernel, "raw_var", shape[:1])
    made = parts.Index(column.start if isinstance(column, slice) else int(column[0]), factor, variance, unit)
    at.seen.tables[id(at.kernel)] = made
    return made


_READ: dict[type | str, tuple[str, Callable[[_Place], Part]]] = {
    kernels.RBFKernel: ("rbf", lambda at: _distances(at, "rbf", at.parameter())),
    kernels.MaternKernel: ("", _matern),
    kernels.RQKernel: ("rq", _rational),
    kernels.PeriodicKernel: ("periodic", _periodic),
    kernels.PiecewisePolynomialKernel: ("piecewise", _piecewise),
    kernels.CosineKernel: ("cosine", lambda at: _distances(at, "cosine", at.parameter("raw_period_length"))),
    kernels.LinearKernel: (
        "linear", lambda at: Products(Mapped(at.raw(), points.weighted, at.parameter("raw_variance")), formulas.linear)
    ),
    kernels.PolynomialKernel: ("polynomial", _polynomial),
    kernels.ConstantKernel: ("constant", lambda at: parts.Constant(at.number("raw_constant"))),
    kernels.IndexKernel: ("index", lambda at: _table(at, "covar_factor", None)),
    kernels.SpectralMixtureKernel: ("mixture", _mixture),
    "botorch.models.kernels.categorical:CategoricalKernel": (
        "categorical", lambda at: parts.Categorical(at.raw(), at.parameter())
    ),
    "botorch.models.kernels.positive_index:PositiveIndexKernel": ("index", _positive_index),
    "botorch.models.kernels.linear_truncated_fidelity:LinearTruncatedFidelityKernel": ("truncated", _truncated),
    "botorch.models.kernels.downsampling:DownsamplingKernel": ("downsampling", lambda at: _of_one(
        at, Products(Mapped(at.raw(), points.raised, at.number("raw_power")), formulas.linear)
    )),
    "botorch.models.kernels.exponential_decay:ExponentialDecayKernel": ("decay", _decay),
}  # fmt: skip
"""Family and reader by class, or by its name, as BoTorch may not be imported; `_matern` adds its family itself."""
FAMILIES = {name for name, _ in _READ.values()} | {"matern12", "matern32", "matern52"}
"""Names of the supported kernel families."""


def called(seen: Inspected, kernel: Any, columns: Array) -> Part:
    """Return the part that evaluates a kernel's `__call__`, which selects active dimensions; or raise UnreadError."""
    if kernel is None:
        raise UnreadError("no kernel")
    chosen = seen.chosen(kernel)
    if chosen is None:
        return forwarded(seen, kernel, columns)
    if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(columns):
        raise UnreadError("active dimensions outside of the points' columns")
    return forwarded(seen, kernel, columns[chosen])


def forwarded(seen: Inspected, kernel: Any, columns: Array) -> Part:
    """Return the part that evaluates a kernel's `forward` on the selected columns."""
    kind = type(kernel)
    seen.attribute(kernel, "_batch_shape")
    if kernel.batch_shape != seen.batch:
        raise UnreadError("a kernel with another batch shape")
    if kind is kernels.ScaleKernel:
        inner = forwarded(seen, seen.module(kernel, "base_kernel"), columns)
        return Scale(inner, seen.parameter(kernel, "raw_outputscale"))
    if kind in (kernels.AdditiveKernel, kernels.ProductKernel):
        several = seen.module(kernel, "kernels")
        children = [called(seen, seen.module(several, name), columns) for name in several._modules]
        if not children:
            raise UnreadError("a sum or product without kernels")
        return Sum(children) if kind is kernels.AdditiveKernel else Product(children)
    name, read = _READ.get(kind) or _READ.get(f"{kind.__module__}:{kind.__qualname__}") or ("", None)
    if read is None:
        raise UnreadError(f"a kernel {kind.__name__}")
    if not len(columns) and kind not in (kernels.RBFKernel, kernels.MaternKernel, kernels.ConstantKernel):
        raise UnreadError("a kernel of no dimensions")
    seen.families += [name] if name else []
    return read(_Place(seen, kernel, columns))
