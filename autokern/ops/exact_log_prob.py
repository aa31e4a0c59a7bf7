"""The Op `exact_log_prob`: the log density of a Gaussian whose covariance is a known kernel plus noise, with gradients.

Arguments: ``marginal, value, exact``: the description of a Gaussian with the covariance ``kernel(x, x) + diagonal``
(`model.marginal`), a value ``(..., n)``, and whether stock would factorise instead of running conjugate gradients.
Gradients must be required. Supported kernels are scales, sums and products of RBF, Matérn 1/2, 3/2, 5/2, RQ, periodic
and constant kernels (ARD, active dimensions, batches); the candidate ``arrays`` also supports linear, polynomial,
piecewise polynomial, cosine, spectral mixture, categorical and index kernels, and BoTorch's kernels of fidelities. For
all others stock runs, whose parts are ops themselves.

First and second derivatives are those of the formula.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor

from autokern.core.errors import caught
from autokern.core.problem import Features, Problem
from autokern.core.state import inside
from autokern.density import array_density, gaussian
from autokern.density.matrices import log_density
from autokern.kernels import tree as trees
from autokern.kernels.family import known_family
from autokern.kernels.matrix import bytes_on
from autokern.model import kernel_parts, libraries
from autokern.model.libraries import TRACES, words
from autokern.model.marginal import Marginal, ingredients, read
from autokern.ops import _candidates as shared
from autokern.ops import _large_models as large_models
from autokern.ops._problems import CG_ITERATIONS, families, is_ours, iterates, kernel_of, matrix_problem, random_matrix
from autokern.system.threads import one_thread

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_FUSED = 1500  # number of points up to which `fused` was faster than stock's factorisation on every recorded CPU


def in_place(problem: Problem, single: float, batched: float) -> int:
    """Return the bytes of `single` matrices and strips of rows of constant size, or of `batched` matrices and more.

    A batch has no strips: each family holds a derivative, values and slopes (the same for an RBF), and all a product.
    """
    elements, names = problem.batch * problem.n**2 * problem.itemsize, families(problem)
    if problem.batch == 1:
        block = min(elements, bytes_on(gaussian.CACHED, problem.device))
        copies = 0 if problem.device == "cpu" else 2 * elements  # there, factor and inverse are copies
        return int(single * elements) + copies + 12 * block * min(2, len(names))
    each = len(names) + sum(1 if name == "rbf" else 2 for name in names) + (names != ["rbf"])
    return int((batched + each) * elements)


def _arrays_unsupported(problem: Problem) -> str | None:
    most = array_density.MOST.get(problem.dtype, 0)
    if problem.device != "cpu" or problem.n > most or problem.batch * problem.n > array_density.MOST_ROWS:
        return f"only for {most} points at most on the CPU, and batches of {array_density.MOST_ROWS} together"
    if families(problem) == ["linear"]:
        return shared.LOW_RANK
    return None if set(families(problem)) <= kernel_parts.FAMILIES else "only for kernels that have a form in NumPy"


def _stock_memory(problem: Problem) -> int:
    """Return stock's bytes: kernel matrices that autograd keeps, the noisy matrix, the factor, and derivatives."""
    names = families(problem)
    kept = sum(of.kept(problem.d) if (of := known_family(name)) else 6 for name in names) - (len(names) - 1)
    more = 3.0 if iterates(problem) else 6.2
    return int((kept + more) * problem.batch * problem.n**2 * problem.itemsize)


class _ExactLogProb(shared.Iterated):
    name = "exact_log_prob"
    summary = "log density of a Gaussian process prior with noise, gradients included"
    nesting = 3

    def key(self, marginal: Marginal, value: Any, exact: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        distribution, _, lazy, noise = marginal
        x, mean = lazy.x1, distribution.loc
        return (
            trees.key(lazy.kernel), x.__class__, x.shape, x.dtype, x.device, x.requires_grad, noise.shape, noise.dtype,
            noise.requires_grad, mean.__class__, mean.shape, mean.dtype, mean.requires_grad, value.__class__,
            value.shape, value.dtype, value.requires_grad, exact, words(exact, TRACES), torch.is_grad_enabled(),
        )  # fmt: skip

    def problem_of(self, marginal: Marginal, value: torch.Tensor, exact: bool) -> Problem | None:
        distribution, _, lazy, noise = marginal
        mean = distribution.loc
        if not torch.is_grad_enabled() or {type(mean), type(value)} - _PLAIN:
            return None
        x, kernel = lazy.x1, lazy.kernel
        names = array_density.families(kernel, x, exact) if x.dim() > 1 and x.shape[-2] > 1 else None
        tensors = [mean, value, noise, *kernel.parameters()]
        if not names or not is_ours(x) or any(t.dtype is not x.dtype or t.device != x.device for t in tensors):
            return None
        n = x.shape[-2]
        try:
            batch = torch.broadcast_shapes(lazy.batch_shape, noise.shape[:-1])
            rows = torch.broadcast_shapes(mean.shape, value.shape)
            if not mean.dim() or not value.dim() or rows[-1] != n or torch.broadcast_shapes(rows[:-1], batch) != batch:
                return None
        except caught(RuntimeError):  # shapes do not match: stock raises its own error
            return None
        if not any(t.requires_grad for t in (x, *tensors)):
            return None
        grad, how = "theta/x" if x.requires_grad else "theta", "cholesky" if exact else "cg"
        variant = f"{'+'.join(names)}/{how}{large_models.word(marginal, value)}{words(exact, TRACES)}"
        return matrix_problem(self.name, x, m=n, n=n, d=x.shape[-1], batch=batch.numel(), grad=grad, variant=variant)

    def reference(self, marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
        lazy, noise = marginal.lazy, marginal.noise
        return log_density(gaussian.dense(lazy.kernel, lazy.x1), noise, value - marginal.distribution.loc)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        kernel = kernel_of(problem, generator)
        x = random_matrix(problem, generator, problem.n, problem.d).requires_grad_("x" in problem.grad.split("/"))
        value = random_matrix(problem, generator, problem.n)
        noise = x.new_full((*value.shape[:-1], 1), 0.1).requires_grad_()
        mean = torch.zeros_like(value).requires_grad_()
        with torch.enable_grad():
            marginal = read(MultivariateNormal(mean, LazyEvaluatedKernelTensor(x, x, kernel=kernel)), noise)
        assert marginal is not None
        return marginal, value, not iterates(problem)

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        full, both = level == "full", ("rbf", "matern52")
        base = Problem(op="exact_log_prob", d=8, dtype=dtype, device=device, variant="rbf/cholesky", grad="theta")
        sizes = [100, 300, 20, 700] + ([50, 450] if full else [])
        large = [1000, 1500, 2600] + ([4500] if full else [])
        whole = [*((n, "cholesky") for n in sizes), *((n, "cg") for n in large)]
        problems = [base.replace(m=n, n=n, variant=f"{w}/{how}") for n, how in whole for w in both]
        problems += [base.replace(m=n, n=n, batch=b) for b, n in ((16, 50), (4, 200), *(((64, 20), (8, 400)) * full))]
        problems += [base.replace(m=n, n=n, grad="theta/x") for n in sizes[:2]]
        problems += [base.replace(m=n, n=n, variant="periodic+rbf/cholesky", d=1) for n in sizes[: 3 if full else 1]]
        if full:
            problems += [base.replace(m=n, n=n, d=d) for n, d in ((100, 2), (500, 20), (1500, 8))]
            problems += [base.replace(m=n, n=n, variant="matern32+rq/cholesky") for n in (60, 400)]
        return problems

    def features(self, problem: Problem) -> Features:
        elements, leaves = problem.batch * problem.n**2, len(families(problem))
        if iterates(problem):
            passes = 2.0 * CG_ITERATIONS + 12.0 * leaves
            return Features(400.0, elements * 6.0 * problem.d * leaves, passes * elements * problem.itemsize)
        flops = elements * (problem.n * 4 / 3 + 6.0 * problem.d * leaves)
        return Features(100.0 + 30 * leaves, flops, (20.0 + 10.0 * leaves) * elements * problem.itemsize)

    def memory(self, problem: Problem) -> int:
        return in_place(problem, 1.03, 1.0)

    def default_candidate(self, problem: Problem) -> str:
        if large_models.unsupported(problem) is None:
            return "state-space"
        most = shared.exact_up_to(problem) if iterates(problem) else _FUSED
        if super().default_candidate(problem) == "arrays" and _arrays_unsupported(problem) is None:
            return "arrays"
        if problem.n > most and self["preconditioned"].unsupported(problem) is None:
            return "preconditioned"
        gains = problem.device == "cpu" and problem.n <= most
        return "fused" if gains and shared.of_trees(problem) is None else "stock"


EXACT_LOG_PROB = _ExactLogProb()


@EXACT_LOG_PROB.candidate("stock", memory=_stock_memory)
def stock(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
    """gpytorch's own: autograd through kernel and Cholesky, or conjugate gradients above `max_cholesky_size`."""
    with shared.as_asked(exact, marginal.distribution.loc.shape[-1]):
        return libraries.log_prob(marginal.noisy(), value)


@EXACT_LOG_PROB.candidate(
    "matrix-free",
    unsupported=shared.every(shared.only("the covariance is factorised", iterates), shared.needs_few),
    memory=lambda p: shared.CG_VECTORS * p.batch * p.n * p.itemsize,  # the op `kernel_matmul` checks its tiles
    parts=True,
    as_stock=True,
    obeys=lambda *_: True,
)
def formless(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
    """gpytorch's conjugate gradients on a kernel matrix that is never formed: `kernel_matmul` multiplies it."""
    with inside.having(formless=True):
        return stock(marginal, value, exact)


@EXACT_LOG_PROB.candidate("fused", accuracy="better", unsupported=shared.of_trees)
@shared.or_iterate(stock)
def fused(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
    """Kernel, factor, inverse and all gradients in one function and one buffer; inverse by LAPACK's potri."""
    return gaussian.log_prob(*ingredients(marginal, value))


shared.with_one_thread(EXACT_LOG_PROB, "fused")


@EXACT_LOG_PROB.candidate(
    "arrays",
    accuracy="better",
    unsupported=_arrays_unsupported,
    threads=1,
    memory=lambda p: in_place(p.replace(batch=1, dtype="float64"), 5.0, 5.0),
)
@shared.or_iterate(stock)
def arrays(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
    """NumPy and LAPACK in float64 from the raw parameters to value and gradients, without autograd between them."""
    with one_thread:
        found = array_density.log_prob(marginal, value)
    if found is not None:
        return found
    unread = trees.form(marginal.lazy.kernel, keops=exact) is None
    return (stock if unread else fused)(marginal, value, exact)


shared.on_other_devices(
    EXACT_LOG_PROB,
    gaussian.log_prob,
    "All of it on the {}: only points and gradients are copied.",
    read=lambda marginal, value, exact: ingredients(marginal, value),
    on_cpu=None,
    on_accelerator=shared.every(shared.of_trees, shared.needs_accelerator),
    accuracy="better",
)


large_models.register(EXACT_LOG_PROB)
