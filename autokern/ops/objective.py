"""The Op `objective`: the negative log marginal likelihood per point of a small exact model, with its gradient.

Arguments: ``reading, forward, parameters``: the arrays of a model (`density.exact_objective`), the function that
computes the loss with modules and autograd, and the parameters, by name, whose gradients are required. The result is
the loss ``()``, or ``(...)`` for a batch of independent models, and the gradients of its sum in the order of the
parameters; they are also stored in each ``grad``. Or ``step, None, None``: one call of a marginal likelihood
(`density.array_density`), whose result is its differentiable value ``()`` or ``(...)`` alone (grad ``theta``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP

from autokern.core.problem import Features, Problem
from autokern.density import array_density
from autokern.density.array_density import Step, step_of
from autokern.density.exact_objective import Reading
from autokern.ops._candidates import LOW_RANK, OpOfParts, every, only, squares
from autokern.ops._problems import families, objective_model, prior_of
from autokern.system.threads import one_thread

_MOST = 1000
"""Number of points above which one thread is slower than the ops that stock calls."""
_SEVERAL, _SINGLE = 16, 150
"""Models of a batch, and points in single precision, above which a step may be slower than the ops that stock calls."""


Found = tuple[torch.Tensor | None, ...]
Forward = Callable[[], torch.Tensor]
Known = Reading | Step
Parameters = Mapping[str, torch.Tensor]


class _Objective(OpOfParts):
    name = "objective"
    summary = "negative marginal likelihood of an exact model, with the gradient by all parameters"
    nesting = 4

    def key(self, reading: Known, forward: Forward | None, parameters: Parameters | None) -> Any:
        return reading.key, parameters is None

    def problem_of(self, reading: Known, forward: Forward | None, parameters: Parameters | None) -> Problem | None:
        (n, d, batch, dtype, device, names), grad = reading.key, "theta" if parameters is None else ""
        return Problem(op="objective", m=n, n=n, d=d, batch=batch, dtype=dtype, device=device, grad=grad, variant=names)

    def reference(self, reading: Known, forward: Forward | None, parameters: Parameters | None) -> Found | torch.Tensor:
        return stock(reading, forward, parameters)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        model = objective_model(problem, generator, priors=not problem.grad)
        model.mean_module.requires_grad_(not problem.grad)
        return _arguments(model, bool(problem.grad))

    def converted(self, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        step = args[2] is None
        model = args[0].reading.mll().model if step else args[0].model
        return _arguments(copy.deepcopy(model).to(dtype), step)

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
        return (4 + 3 * _parts(problem)) * problem.n**2 * 8

    def small(self, problem: Problem) -> bool:
        few = super().small(problem)
        if problem.batch > 1:  # of many small models, torch computes a step at once
            at_once = problem.batch > _SEVERAL or (problem.dtype == "float32" and problem.n > _SINGLE)
            few = not (at_once and problem.grad)
        return few and _unsupported(problem) is None


OBJECTIVE = _Objective()


def _arguments(model: ExactGP, step: bool) -> tuple[Any, ...]:
    mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
    if step:
        with torch.enable_grad():
            prior = prior_of(model)
            prior = MultivariateNormal(prior.loc.detach().requires_grad_(), prior.lazy_covariance_matrix)
        return step_of(mll, mll.forward, prior, model.train_targets), None, None

    def forward() -> torch.Tensor:
        return -mll(model(*model.train_inputs), model.train_targets)

    return Reading(mll), forward, {name: p for name, p in mll.named_parameters() if p.requires_grad}


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


_unsupported = every(
    only(LOW_RANK, lambda p: families(p) != ["linear"]),
    only(f"more than {_MOST} points on one thread", lambda p: p.n * p.batch <= _MOST),
)


@OBJECTIVE.candidate("arrays", unsupported=_unsupported, threads=1)
def arrays(reading: Any, forward: Forward | None, parameters: Parameters | None) -> Found | torch.Tensor:
    """NumPy and LAPACK from the raw parameters to the gradients, without modules and without autograd."""
    with one_thread:
        found = array_density.loss(reading) if parameters is None else reading.evaluate(parameters)
    if found is None:  # stock adds jitter, warns or raises
        return stock(reading, forward, parameters)
    return found if parameters is None else (found[0], *found[1])
