"""What autograd, threads and the collector may ask of anything computed, of each candidate that can compute it."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from builders import GRAPHLESS, KERNELS, points, regression, values
from gpytorch.kernels import PiecewisePolynomialKernel
from linear_operator.operators import AddedDiagLinearOperator, ConstantDiagLinearOperator, DenseLinearOperator
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.qr import stable_qr
from support.threads import in_threads
from table import See, cases, scenarios
from torch.autograd import forward_ad

from scenarios.kernels import made
from scenarios.models import tasked
from scenarios.predictions import under
from scenarios.training import loss_of

Computed = tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]
"""What was computed, the leaves that it depends on, and objects that must not outlive it."""


def _density(see: See, kernel: Any, batch: tuple[int, ...] = (), likelihood: str = "gaussian") -> Computed:
    model = regression(see, 13, kernel, likelihood, batch=batch)
    return [loss_of(model)], list(model.parameters()), [model, model.covar_module]


def _of_tasks(see: See) -> Computed:
    model, _, _ = tasked(see, "kronecker")
    return [loss_of(model)], list(model.parameters()), [model]


def _posterior(see: See, m: int, *settings: str, kernel: str = "scaled rbf") -> Computed:
    model, x = regression(see, 15, kernel).eval(), points(see, m, seed=1).requires_grad_()
    with under(*settings):
        p = model(x)
        moments = [p.mean, p.covariance_matrix] if m < 100 else [p.mean, p.variance]
    return moments, [x, *model.covar_module.parameters()] if "attached" in settings else [x], [model]


def _fantasy(see: See) -> Computed:
    model, z = regression(see, 15).eval(), points(see, 2, seed=7).requires_grad_()
    with under("attached"):
        _ = model(points(see, 3, seed=1)).variance
        p = model.get_fantasy_model(z, values(z.detach()))(points(see, 4, seed=2))
        return [p.mean, p.variance], [z], [model]


def _matrix(see: See, kernel: str, others: int = 0) -> Computed:
    k, x = made(see, kernel), points(see, 20).requires_grad_()
    found = k(x, points(see, others, seed=1)).to_dense() if others else k(x).to_dense()
    return [found], [x, *k.parameters()] if others else list(k.parameters()), [k]


def _covariance(see: See) -> torch.Tensor:
    return KERNELS["scaled rbf"](torch.Size()).to(see.dtype)(points(see, 12)).to_dense().detach().requires_grad_()


def _solved(see: See) -> Computed:
    k, noise = _covariance(see), torch.full((1,), 0.1, dtype=see.dtype, requires_grad=True)
    system = AddedDiagLinearOperator(DenseLinearOperator(k * 1.0), ConstantDiagLinearOperator(noise, 12))
    return [*system.inv_quad_logdet(points(see, 12, seed=2), logdet=True)], [k, noise], []


def _factorised(see: See) -> Computed:
    k = _covariance(see)
    return [psd_safe_cholesky(k + torch.eye(12, dtype=see.dtype))], [k], []


def _orthogonal(see: See) -> Computed:
    a = (points(see, 30, d=4, seed=3) + torch.eye(30, 4, dtype=see.dtype)).requires_grad_()
    q, r = stable_qr(a)
    return [r.mT @ r, q @ r], [a], []


SUBJECTS: dict[str, Callable[[See], Computed]] = {
    "a density": lambda see: _density(see, "scaled rbf"),
    "a density of a sum": lambda see: _density(see, "rbf + matern"),
    "a density of a linear kernel": lambda see: _density(see, "rbf + linear"),
    "a density of a matrix": lambda see: _density(see, PiecewisePolynomialKernel(0)),
    "a density of matern32": lambda see: _density(see, "scaled matern32"),
    "a density of matern12": lambda see: _density(see, "scaled matern12"),
    "a density of tasks": _of_tasks,
    "densities of a batch": lambda see: _density(see, "scaled rbf", (2,)),
    "densities of fixed noise": lambda see: _density(see, "scaled rbf", (2, 3), "fixed"),
    "a posterior": lambda see: _posterior(see, 5),
    "a posterior of a linear kernel": lambda see: _posterior(see, 5, kernel="rbf + linear"),
    "a posterior by a root": lambda see: _posterior(see, 5, "fast"),
    "a posterior with attached caches": lambda see: _posterior(see, 5, "attached"),
    "many variances": lambda see: _posterior(see, 300, "attached"),
    "a fantasy": _fantasy,
    "a matrix": lambda see: _matrix(see, "scaled rbf"),
    "a matrix of others": lambda see: _matrix(see, "scaled matern52", 7),
    "a quadratic form": _solved,
    "a factor": _factorised,
    "a decomposition": _orthogonal,
}


def _weighted(outs: list[torch.Tensor]) -> torch.Tensor:
    return sum((t * torch.linspace(1, 2, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in outs)  # type: ignore


def _slopes(of: Any, leaves: list[torch.Tensor], *cotangents: Any, **how: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(of, leaves, *cotangents, allow_unused=True, materialize_grads=True, **how))


def _again(see: See, outs, leaves, _):
    """A graph serves as often as it is kept, and then no more."""
    for k in range(2):
        see(f"kept {k}", _slopes(_weighted(outs), leaves, retain_graph=True))
    see("last", _slopes(_weighted(outs), leaves))
    with see.attempt("again"):
        _slopes(_weighted(outs), leaves)


def _one_by_one(see: See, outs, leaves, _):
    """Each leaf of each result by itself; the last one frees what is left."""
    for k, out in enumerate(outs):
        for j, leaf in enumerate(leaves):
            last = k == len(outs) - 1 and j == len(leaves) - 1
            see(f"{k} by {j}", _slopes(_weighted([out]), [leaf], retain_graph=not last))


def _batched(see: See, outs, leaves, _):
    cotangents = [torch.stack((torch.ones_like(t), t.detach().sin(), 0 * t.detach())) for t in outs]
    see("slopes", _slopes(outs, leaves, cotangents, is_grads_batched=True))


def _vmapped(see: See, outs, leaves, _):
    """By the newer vmap, which nests, with and without a graph."""
    cotangents = [torch.stack((torch.ones_like(t), t.detach().sin())) for t in outs]
    for graph in (False, True):

        def slopes(*v, graph=graph):
            return tuple(torch.autograd.grad(outs, leaves, v, retain_graph=True, create_graph=graph))

        see(f"slopes, {graph}", torch.vmap(slopes)(*cotangents))
        see(f"nested, {graph}", torch.vmap(torch.vmap(slopes))(*(t[None] for t in cotangents)))


def _created(see: See, outs, leaves, _):
    first = _slopes(_weighted(outs), leaves, create_graph=True)
    see("first", first)
    total = sum(slope.sin().sum() for slope in first)
    see("second", _slopes(total, leaves) if total.requires_grad else "none")


def _of_zeros(see: See, outs, leaves, _):
    """Zeros that take no memory, as autograd makes them."""
    zeros = [torch._efficientzerotensor(t.shape, dtype=t.dtype) for t in outs]
    see("zeros", [t + 0.0 for t in _slopes(outs, leaves, zeros, retain_graph=True)])
    see("one", _slopes(outs, leaves, [torch.ones_like(outs[0]), *zeros[1:]]))


def _tangents(see: See, outs, leaves, _):
    """Forward-mode derivatives by cotangents."""
    with forward_ad.dual_level(), see.attempt("went"):
        cotangents = [forward_ad.make_dual(torch.ones_like(t), t.detach().cos()) for t in outs]
        for k, slope in enumerate(_slopes(outs, leaves, cotangents)):
            value, tangent = forward_ad.unpack_dual(slope)
            see(f"value {k}", value.clone())
            see(f"tangent {k}", "none" if tangent is None else tangent.clone())


def _threads(see: See, outs, leaves, _):
    """Threads that share a graph do not meet."""
    value = _weighted(outs)
    found = in_threads(lambda _: [_slopes(value, leaves, retain_graph=True) for _ in range(4)], range(3))
    see("slopes", [slopes for of_thread in found for slopes in of_thread])


def _hooked(see: See, outs, leaves, _):
    """Hooks of leaves and of results are called, and obeyed."""
    calls = []
    for t in (*leaves, *(t for t in outs if t.grad_fn is not None)):
        t.register_hook(lambda g: calls.append(1) or 2 * g)
    _weighted(outs).backward()
    see("calls", len(calls))
    see("slopes", [leaf.grad for leaf in leaves if leaf.grad is not None])


def _written(see: See, outs, leaves, _):
    with torch.no_grad():
        for leaf in leaves if see.first else ():
            leaf.add_(0.5)
    with see.attempt("backward"):
        see("slopes", _slopes(_weighted(outs), leaves))


def _frozen(see: See, outs, leaves, _):
    """What wants no gradient later has one of its call."""
    for leaf in leaves[1:]:
        leaf.requires_grad_(False)
    see("slope", _slopes(_weighted(outs), leaves[:1]))


ROWS = {
    "again": _again, "one by one": _one_by_one, "batched": _batched, "vmapped": _vmapped, "second": _created,
    "zeros": _of_zeros, "tangents": _tangents, "threads": _threads, "hooks": _hooked, "frozen": _frozen,
}  # fmt: skip
APART = [
    ("a density of a matrix", "second"),  # stock differentiates roots of rounded distances
    ("a density of tasks", "second"),  # stock's lose a part
    ("a density of tasks", "batched"),  # stock cannot, as in those that follow
    ("a fantasy", "tangents"),
    *((of, "vmapped") for of in ("a density of tasks", "a posterior", "a posterior with attached caches")),
    *((of, "vmapped") for of in ("a posterior of a linear kernel", "many variances", "a fantasy")),
]
"""What stock does not do, or not right."""


@scenarios(
    [case for case in cases(of=list(SUBJECTS), row=list(ROWS)) if tuple(case.values()) not in APART],
    cases(of=list(SUBJECTS), row="written", stale="stock's backward pass says so, or does not need the values"),
    kappa=10.0,
    formula=GRAPHLESS,
)
def asked(see: See, of: str, row: str):
    outs, leaves, kept = SUBJECTS[of](see)
    (ROWS | {"written": _written})[row](see, outs, leaves, kept)


@scenarios(cases(of=list(SUBJECTS)), rare=True)
def freed(see: See, of: str):
    """With what it computed, a model is gone; a backward pass in between leaves nothing behind."""
    outs, leaves, kept = SUBJECTS[of](see)
    alive = [weakref.ref(one) for one in (*kept, *outs)]
    _weighted(outs).backward()
    del outs, leaves, kept
    gc.collect()
    see("alive", [one() is not None for one in alive])


@scenarios(cases(of=list(SUBJECTS), mode=["no_grad", "inference"]))
def computed_without(see: See, of: str, mode: str):
    with torch.no_grad() if mode == "no_grad" else torch.inference_mode(), see.attempt("went"):
        outs, _, _ = SUBJECTS[of](see)
        see("values", outs)
        see("kinds", [f"{t.requires_grad} {t.is_inference()}" for t in outs])
