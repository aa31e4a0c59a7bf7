"""Candidates of `exact_log_prob` that factorise the whole covariance: by LAPACK, in arrays, and on other devices."""

from __future__ import annotations

import torch

from autokern.core.op import Op
from autokern.core.problem import Features, Problem
from autokern.gp import array_density, likelihood
from autokern.gp.marginal import Marginal, ingredients
from autokern.gp.originals import psd_safe_cholesky as ladder
from autokern.kernels import tree as trees
from autokern.ops._density_costs import arrays_unsupported, in_place
from autokern.ops._iterations import or_iterate
from autokern.ops._shared import (
    merged_rows,
    needs_accelerator,
    of_trees,
    on_other_devices,
    with_one_thread,
)
from autokern.system.blas import one_thread

__all__ = ["register"]


def _arrays_memory(problem: Problem) -> int:
    return in_place(5.0, 5.0)(problem.replace(batch=1, dtype="float64"))


def _elsewhere(there: torch.device, marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
    tree, added, residual = ingredients(marginal, value)
    away = tree.each(lambda t: t.to(there))
    return likelihood.log_prob(away, added.to(there), residual.to(there), ladder).to(value.device)


def register(op: Op) -> None:
    """Register the candidates."""
    stock = op.stock.run

    @op.candidate("fused", accuracy="better", unsupported=of_trees)
    @or_iterate(stock)
    def fused(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
        """Kernel, factor, inverse and all gradients in one function and one buffer; inverse by LAPACK's potri."""
        return likelihood.log_prob(*ingredients(marginal, value), ladder)

    with_one_thread(op, "fused")

    def arrays_features(problem: Problem) -> Features:
        """Model by model, repeated points once, and in double precision whatever the arguments have."""
        one = op.features(problem.replace(batch=1, dtype="float64", n=merged_rows(problem)))
        return Features(one.calls * problem.batch, one.flops * problem.batch, one.bytes * problem.batch)

    @op.candidate(
        "arrays", accuracy="better", unsupported=arrays_unsupported, memory=_arrays_memory, features=arrays_features
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
        lambda p: 2 * p.n * (p.d + 2),
        on_accelerator=lambda p: of_trees(p) or needs_accelerator(p),
        accuracy="better",
    )
