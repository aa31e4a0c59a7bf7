"""Candidates of `exact_log_prob`: fused, by arrays, on other devices, and of large models.

``mixed-inverse`` computes the value like `fused`, and gradients from a single-precision inverse. It checks that inverse
on the caller's own system: ``tr(K^-1 K) = n`` to 1e-4 effective degrees of freedom, the solution to 1e-3 of its norm,
the gradient by the log of each hyperparameter to an estimated 1e-3 of its terms; else it inverts in double precision.
``preconditioned`` solves to a stated residual; if its iterations do not converge, `matrix-free` serves.
"""

from __future__ import annotations

import torch
from linear_operator import settings as library

from autokern.core.op import Op
from autokern.core.problem import Error, Problem
from autokern.density import array_density, gaussian, iterated_density
from autokern.density.mixed_inverse import OF_EACH, OF_SOLUTION, OF_TRACE, mixed_for
from autokern.density.preconditioners import footprint, kept_for
from autokern.kernels import tree as trees
from autokern.kernels.matrix import bytes_on
from autokern.model import kernel_parts
from autokern.model.library_orders import TIGHT, tolerance
from autokern.model.marginal import Marginal, ingredients
from autokern.ops._candidates import (
    LOW_RANK,
    Bytes,
    as_own_iterations,
    every,
    needs_accelerator,
    of_trees,
    on_other_devices,
    only,
    or_iterate,
    to_a_residual,
    with_one_thread,
)
from autokern.ops._problems import families, iterates
from autokern.system.threads import one_thread


def in_place(single: float, batched: float) -> Bytes:
    """Return a memory rule: `single` matrices and strips of rows of constant size, or `batched` matrices and more.

    In a batch these are whole: for each family derivative, values and slopes (the same for an RBF), and a product.
    """

    def memory(problem: Problem) -> int:
        elements, names = problem.batch * problem.n**2 * problem.itemsize, families(problem)
        if problem.batch == 1:
            block = min(elements, bytes_on(gaussian.CACHED, problem.device))
            copies = 0 if problem.device == "cpu" else 2 * elements  # factor and inverse are not in place there
            return int(single * elements) + copies + 12 * block * min(2, len(names))
        each = len(names) + sum(1 if name == "rbf" else 2 for name in names) + (names != ["rbf"])
        return int((batched + each) * elements)

    return memory


def arrays_unsupported(problem: Problem) -> str | None:
    most = array_density.MOST.get(problem.dtype, 0)
    if problem.device != "cpu" or problem.n > most or problem.batch * problem.n > array_density.MOST_ROWS:
        return f"for {most} points at most on the CPU, and batches of {array_density.MOST_ROWS} together"
    if families(problem) == ["linear"]:
        return LOW_RANK
    return None if set(families(problem)) <= kernel_parts.FAMILIES else "for kernels that are taken apart"


_LEAST = 1000
"""Number of points below which other candidates are faster."""
_CANCELLED = 10.0
"""Assumed ratio of the terms of a gradient to the gradient, by cancellation."""
_TILES = 2**26
"""Bytes of the tiles in which kernels and derivatives are formed."""


_large = every(
    only(
        f"for one matrix of {_LEAST} points or more on the CPU",
        lambda p: p.n >= _LEAST and p.batch <= 1 and p.device == "cpu",
    ),
    of_trees,
    only("the points require gradients", lambda p: "x" not in p.grad.split("/")),
)
_mixed_unsupported = every(
    only("the covariance is factorised, and gradients to the last digit are expected", iterates),
    only("its check lets more pass than your cg_tolerance", lambda p: TIGHT not in p.words),
    only("for double precision", lambda p: p.dtype == "float64"),
    _large,
)
_CHECKED = Error(
    "checked",
    "the value is exact; the single-precision inverse of the gradients is checked on your system (tr(K^-1 K) to "
    f"{OF_TRACE:.0e} degrees of freedom, the solution to {OF_SOLUTION:.0e}, each gradient to {OF_EACH:.0e} of its "
    "terms by an estimate), else one in double precision serves",
    gradients=_CANCELLED * OF_EACH,
)


def _mixed_memory(problem: Problem) -> int:
    """Return the bytes of one matrix in double precision, one in single, and tiles."""
    return int(1.55 * problem.n**2 * problem.itemsize) + _TILES * min(2, len(families(problem)))


def _iterated_memory(problem: Problem) -> int:
    matrix = problem.n**2 * problem.itemsize
    held = matrix if matrix <= iterated_density.DENSE else _TILES
    return held + footprint(problem.n) + problem.n * 210 * 8


def register(op: Op) -> None:
    stock = op.stock.run

    @op.candidate("fused", accuracy="better", unsupported=of_trees)
    @or_iterate(stock)
    def fused(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
        """Kernel, factor, inverse and all gradients in one function and one buffer; inverse by LAPACK's potri."""
        return gaussian.log_prob(*ingredients(marginal, value))

    with_one_thread(op, "fused")

    @op.candidate(
        "arrays",
        accuracy="better",
        unsupported=arrays_unsupported,
        threads=1,
        memory=lambda p: in_place(5.0, 5.0)(p.replace(batch=1, dtype="float64")),
    )
    @or_iterate(stock)
    def arrays(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
        """NumPy and LAPACK in float64 from the raw parameters to value and gradients, without autograd between them."""
        with one_thread:
            found = array_density.log_prob(marginal, value)
        if found is not None:
            return found
        unread = trees.form(marginal.lazy.kernel, keops=exact) is None
        return (stock if unread else fused)(marginal, value, exact)

    on_other_devices(
        op,
        gaussian.log_prob,
        "All of it on the {}: only points and gradients are copied.",
        read=lambda marginal, value, exact: ingredients(marginal, value),
        on_accelerator=every(of_trees, needs_accelerator),
        accuracy="better",
    )

    @op.candidate(
        "mixed-inverse",
        accuracy="better",
        unsupported=_mixed_unsupported,
        memory=_mixed_memory,
        error=lambda p: _CHECKED,
    )
    @or_iterate(stock)
    def by_single(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
        """`fused` with an inverse in single precision: the value is exact, the error of the gradients is checked."""
        own = mixed_for(marginal.lazy.kernel)
        return gaussian.log_prob(*ingredients(marginal, value), own)

    @op.candidate(
        "preconditioned",
        accuracy="better",
        unsupported=every(only("the covariance is factorised", iterates), _large),
        memory=_iterated_memory,
        parts=True,
        as_stock=True,
        obeys=as_own_iterations,
        error=to_a_residual("; the log determinant and its gradient by probes, whose standard error calls tell"),
    )
    def preconditioned(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
        """Conjugate gradients to a stated residual; the preconditioner (neighbours or pivots) is chosen per system."""
        kernel, x = marginal.lazy.kernel, marginal.lazy.x1
        found = iterated_density.log_prob(
            *ingredients(marginal, value), kept_for(kernel, x), library.num_trace_samples.value(), tolerance(x.dtype)
        )
        return op["matrix-free"].run(marginal, value, exact) if found is None else found
