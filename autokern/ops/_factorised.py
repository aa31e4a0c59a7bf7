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
from autokern.ops._iterations import as_own_iterations, or_iterate, to_a_residual
from autokern.ops._problems import (
    LOW_RANK,
    Bytes,
    families,
    iterates,
    needs_accelerator,
    of_trees,
    on_other_devices,
    with_one_thread,
)
from autokern.system.threads import one_thread


def in_place(single: float, batched: float) -> Bytes:
    """Return a memory rule: `single` matrices and strips of rows of constant size, or `batched` matrices and more.

    In a batch these are whole matrices too: for each family the derivative, and values and slopes (the same for an
    RBF); and a product of two of them, except for a single RBF.
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
    """Return why `arrays` cannot serve a problem, None if it can."""
    most = array_density.MOST.get(problem.dtype, 0)
    if problem.device != "cpu" or problem.n > most or problem.batch * problem.n > array_density.MOST_ROWS:
        return f"for {most} points at most on the CPU, and batches of {array_density.MOST_ROWS} together"
    if families(problem) == ["linear"]:
        return LOW_RANK
    return None if set(families(problem)) <= kernel_parts.FAMILIES else "for kernels that are taken apart"


def _elsewhere(there: torch.device, marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
    tree, added, residual = ingredients(marginal, value)
    away = tree.each(lambda t: t.to(there))
    return gaussian.log_prob(away, added.to(there), residual.to(there)).to(value.device)


_LEAST = 1000
"""Number of points below which other candidates are faster."""
_CANCELLED = 10.0
"""Assumed ratio of the terms of a gradient to the gradient, by cancellation."""
_TILES = 2**26
"""Bytes of the tiles in which kernels and derivatives are formed."""


def _too_small(problem: Problem) -> str | None:
    if problem.n < _LEAST or problem.batch > 1 or problem.device != "cpu":
        return f"for one matrix of {_LEAST} points or more on the CPU"
    return of_trees(problem) or ("the points require gradients" if "x" in problem.grad.split("/") else None)


def _mixed_unsupported(problem: Problem) -> str | None:
    if not iterates(problem):
        return "the covariance is factorised, and gradients to the last digit are expected"
    if TIGHT in problem.words:
        return "its check lets more pass than your cg_tolerance"
    return _too_small(problem) if problem.dtype == "float64" else "for double precision"


def _mixed_memory(problem: Problem) -> int:
    """Return the bytes of one matrix in double precision, one in single, and tiles."""
    return int(1.55 * problem.n**2 * problem.itemsize) + _TILES * min(2, len(families(problem)))


def _mixed_error(problem: Problem) -> Error:
    check = (
        f"tr(K^-1 K) to {OF_TRACE:.0e} degrees of freedom, the solution to {OF_SOLUTION:.0e}, "
        f"each gradient to {OF_EACH:.0e} of its terms by an estimate"
    )
    words = f"the value is exact; the single-precision inverse of the gradients is checked on your system ({check})"
    return Error("checked", f"{words}, else one in double precision serves", gradients=_CANCELLED * OF_EACH)


def _is_held(problem: Problem) -> bool:
    return problem.n**2 * problem.itemsize <= iterated_density.DENSE


def _iterated_memory(problem: Problem) -> int:
    matrix = problem.n**2 * problem.itemsize if _is_held(problem) else _TILES
    return matrix + footprint(problem.n) + problem.n * 210 * 8


def register(op: Op) -> None:
    """Register the candidates."""
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
        _elsewhere,
        "All of it on the {}: only points and gradients are copied.",
        on_accelerator=lambda p: of_trees(p) or needs_accelerator(p),
        accuracy="better",
    )

    @op.candidate(
        "mixed-inverse", accuracy="better", unsupported=_mixed_unsupported, memory=_mixed_memory, error=_mixed_error
    )
    @or_iterate(stock)
    def by_single(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
        """`fused` with an inverse in single precision: the value is exact, the error of the gradients is checked."""
        own = mixed_for(marginal.lazy.kernel)
        return gaussian.log_prob(*ingredients(marginal, value), own)

    @op.candidate(
        "preconditioned",
        accuracy="better",
        unsupported=lambda p: _too_small(p) if iterates(p) else "the covariance is factorised",
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
