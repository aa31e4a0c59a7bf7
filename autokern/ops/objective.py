"""The Op `objective`: the negative log marginal likelihood per point of a small exact model, with its gradient.

Arguments: ``reading, forward, parameters``: the arrays of a model (`density.exact_objective`), the function that
computes the loss with modules and autograd, and the parameters, by name, whose gradients are required. The result is
the loss ``()``, or ``(...)`` for a batch of independent models, and the gradients of its sum in the order of the
parameters; they are also stored in each ``grad``. Or ``step, None, None``: one call of a marginal likelihood
(`density.steps`), whose result is its differentiable value ``()`` or ``(...)`` alone (grad ``theta``).

Contract: the loss is that of a matrix within ``2 (n + s) eps max |K|`` of K, where s is the largest scaled squared norm
of the points; gradients lie within the same change, enlarged by the condition of K.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood

from autokern.core.problem import Features, Problem
from autokern.density import steps
from autokern.density.exact_objective import Reading
from autokern.density.steps import Step, step_of
from autokern.kernels import tree as trees
from autokern.ops._shared.problems import EPS, LOW_RANK, OpOfParts, families, squares
from autokern.ops._shared.sample_models import objective_model, prior_of
from autokern.system.threads import one_thread

_MOST = 1000
"""Number of points above which one thread is slower than the ops that stock calls."""


Found = tuple[torch.Tensor | None, ...]
Forward = Callable[[], torch.Tensor]
Known = Reading | Step
Parameters = Mapping[str, torch.Tensor]


class _Objective(OpOfParts):
    name = "objective"
    summary = "negative marginal likelihood of an exact model, with the gradient by all parameters"
    contract = "the loss is that of a matrix within 2 (n + s) eps max|K| of K; gradients as their condition allows"
    nesting = 4

    def key(self, reading: Known, forward: Forward | None, parameters: Parameters | None) -> Any:
        return reading.key, parameters is None

    def problem_of(self, reading: Known, forward: Forward | None, parameters: Parameters | None) -> Problem | None:
        (n, d, batch, dtype, device, families), grad = reading.key, "theta" if parameters is None else ""
        like: dict[str, Any] = {"device": device, "dtype": dtype, "grad": grad, "variant": families}
        return Problem(op="objective", m=n, n=n, d=d, batch=batch, **like)

    def reference(self, reading: Known, forward: Forward | None, parameters: Parameters | None) -> Found | torch.Tensor:
        return stock(reading, forward, parameters)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        model = objective_model(problem, generator, priors=not problem.grad)
        mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
        if problem.grad:
            model.mean_module.requires_grad_(False)
            with torch.enable_grad():
                prior = prior_of(model)
                prior = MultivariateNormal(prior.loc.detach().requires_grad_(), prior.lazy_covariance_matrix)
            step = step_of(mll, mll.forward, prior, model.train_targets)
            assert step is not None
            return step, None, None
        reading = Reading(mll)

        def forward() -> torch.Tensor:
            loss: torch.Tensor = -mll(model(*model.train_inputs), model.train_targets)
            return loss

        return reading, forward, {name: p for name, p in mll.named_parameters() if p.requires_grad}

    def check(self, problem: Problem, out: Any, args: tuple[Any, ...]) -> float:
        whole = args[2] is not None
        model = args[0].model if whole else args[0].reading.mll().model
        found, *rest = out if whole else (out,)
        gradients = [None if t is None else t.clone() for t in rest]
        truth = stock(*args)
        losses, *slopes = truth if isinstance(truth, tuple) else (truth.detach(),)
        assert losses is not None
        largest = max((float(g.abs().max()) for g in slopes if g is not None), default=1.0)
        k, residuals, size = _systems(model)
        inverse, n, eps = torch.linalg.inv(k), problem.n, EPS[problem.dtype]
        solved = (inverse @ residuals.unsqueeze(-1)).squeeze(-1)
        change = 2 * (n + size) * eps * k.abs().amax((-2, -1))
        by_matrix = 0.5 * (solved.square().sum(-1) + inverse.diagonal(dim1=-2, dim2=-1).sum(-1)) / n
        one, exact = (t.detach().double().cpu() for t in (found, losses))
        errors = [float(((one - exact).abs() / (change * by_matrix + 20 * eps * (1 + exact.abs()))).max())]
        bound = float((100 * eps * (n + size) * torch.linalg.cond(k) * (largest + by_matrix)).max())
        for ours, wanted in zip(gradients, slopes, strict=True):
            if ours is not None and wanted is not None:
                errors.append(float((ours - wanted).abs().max()) / bound)
        return float(max(errors))

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        base = Problem(op="objective", d=6, dtype=dtype, device=device, variant="rbf")
        sizes = [20, 100, 50, 200] + ([10, 35, 70, 140, 300, 450, 700] if level == "full" else [])
        problems = [base.replace(m=n, n=n, variant=w) for n in sizes for w in ("rbf", "matern52")]
        if level == "full":
            problems += [base.replace(m=n, n=n, d=d) for n in (30, 150) for d in (1, 20)]
            problems += [base.replace(m=n, n=n, variant="matern52+rbf") for n in (30, 150)]
        several = [(2, 50), (4, 100)] + ([(2, 20), (8, 20)] if level == "full" else [])
        problems += [base.replace(m=n, n=n, batch=b) for b, n in several]
        problems += [base.replace(m=n, n=n, grad="theta") for n in sizes[:4] + sizes[-3:] * (level == "full")]
        return problems

    def features(self, problem: Problem) -> Features:
        parts, elements = _parts(problem), float(problem.batch * problem.n**2)
        flops = elements * (problem.n * 4 / 3 + 6.0 * problem.d * parts)
        return Features(400.0 + 60 * parts, flops, (20.0 + 10.0 * parts) * problem.itemsize * elements)

    def memory(self, problem: Problem) -> int:
        parts = _parts(problem)
        return (4 + 3 * parts) * problem.n**2 * 8

    def small(self, problem: Problem) -> bool:
        return super().small(problem) and _unsupported(problem) is None


OBJECTIVE = _Objective()


@torch.no_grad()
def _systems(model: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return noisy covariances, residuals, and the largest scaled squared norm of a point, in double precision."""
    own = copy.deepcopy(model).double().cpu()
    (x,), targets = own.train_inputs, own.train_targets
    tree = trees.read(own.covar_module, x)
    k = trees.dense(tree) + torch.diag_embed(own.likelihood.noise.expand(targets.shape))
    size = max((z - z.mean(-2, keepdim=True)).square().sum(-1).max().item() for z in tree.points)
    return k, targets - own.mean_module(x), float(size)


def _parts(problem: Problem) -> int:
    """Return the number of leaves of the kernel; a spectral mixture counts as four per dimension."""
    return sum(4 * problem.d if name == "mixture" else 1 for name in families(problem))


@OBJECTIVE.candidate("stock", memory=squares(1))  # inner ops check their own
def stock(reading: Known, forward: Forward | None, parameters: Parameters | None) -> Found | torch.Tensor:
    """The libraries' own: modules forward, autograd backward; inner ops are dispatched."""
    if forward is None or parameters is None:
        assert isinstance(reading, Step)
        return reading.forward(reading.distribution, reading.value)
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.zero_()
    with torch.enable_grad():
        loss = forward()
        loss.sum().backward()
    return loss, *(parameter.grad for parameter in parameters.values())


def _unsupported(problem: Problem) -> str | None:
    if families(problem) == ["linear"]:
        return LOW_RANK
    return None if problem.n * problem.batch <= _MOST else f"more than {_MOST} points on one thread"


@OBJECTIVE.candidate("arrays", unsupported=_unsupported)
def arrays(reading: Known, forward: Forward | None, parameters: Parameters | None) -> Found | torch.Tensor:
    """NumPy and LAPACK from the raw parameters to the gradients, without modules and without autograd."""
    if isinstance(reading, Step) or parameters is None:
        with one_thread:
            value = steps.loss(cast("Step", reading))
        return stock(reading, forward, parameters) if value is None else value
    with one_thread:
        found = reading.evaluate(parameters)
    if found is None:  # stock adds jitter, warns or raises
        return stock(reading, forward, parameters)
    losses, gradients = found
    return losses, *gradients
