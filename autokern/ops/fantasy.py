"""The Op `fantasy`: the caches of a model after new observations, without a new factorisation.

The argument is an `Update`, the result a new strategy. Trials compute and check its mean cache ``alpha`` and the
variance ``1^T K^-1 1`` that it explains for a row of ones.
"""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.operators import BatchRepeatLinearOperator
from linear_operator.utils.memoize import get_from_cache

from autokern.core.problem import Error, Features, Problem
from autokern.model import libraries
from autokern.ops._candidates import OpOfParts, as_asked
from autokern.ops._problems import is_ours, iterates, matrix_problem, random_matrix, trained
from autokern.prediction import factor_cache
from autokern.prediction.factor_cache import Update
from autokern.prediction.lazy_covariance import evaluated


def _graph(full_inputs: Any, targets: Any) -> str:
    """Return ``x`` if gradients by points or targets are required, else an empty string."""
    wanted = torch.is_grad_enabled() and (targets.requires_grad or any(x.requires_grad for x in full_inputs))
    return "x" if wanted else ""


class _Fantasy(OpOfParts):
    name = "fantasy"
    summary = "caches of a model after new observations"
    nesting = 4
    looseness = Error("rank 100", "stock extends a Lanczos decomposition, by default of rank 100")

    def key(self, update: Update) -> Any:
        strategy, inputs, targets, full_inputs, full_targets, full_output, noise, exact = update
        x = full_inputs[0]
        return (
            strategy.__class__, strategy.train_labels.shape, inputs[0].shape, targets.shape, x.__class__, x.shape,
            x.dtype, x.device, full_targets.shape, full_output.__class__, full_output.lazy_covariance_matrix.__class__,
            full_output.lazy_covariance_matrix.shape, strategy.train_inputs[0].shape,
            noise is None, exact, _graph(full_inputs, targets), factor_cache.plain(strategy),
        )  # fmt: skip

    def problem_of(self, update: Update) -> Problem | None:
        strategy, _, targets, full_inputs, full_targets, full_output, _, exact = update
        if type(strategy) is not DefaultPredictionStrategy or isinstance(full_output, MultitaskMultivariateNormal):
            return None
        lazy = full_output.lazy_covariance_matrix
        if type(lazy) is not LazyEvaluatedKernelTensor or lazy.last_dim_is_batch or not factor_cache.plain(strategy):
            return None
        x, n, total = full_inputs[0], strategy.num_train, full_targets.shape[-1]
        lead, own = full_targets.shape[:-1], lazy.shape[:-2]
        if not is_ours(x) or lazy.shape[-1] != total or total <= n or lead[len(lead) - len(own) :] != own:
            return None
        if strategy.train_inputs[0].shape[-2] != n or len(lead) - len(own) > 1:
            return None
        sizes = {"m": total - n, "n": n, "d": x.shape[-1], "batch": own.numel()}
        sizes["rhs"] = lead.numel() // max(1, own.numel())
        variant = "cholesky" if exact else "lanczos/cg"
        return matrix_problem(self.name, x, **sizes, grad=_graph(full_inputs, targets), variant=variant)

    def reference(self, update: Update) -> tuple[torch.Tensor, torch.Tensor]:
        strategy, _, targets, _, full_targets, full_output, _, _ = update
        k = strategy.likelihood(full_output).lazy_covariance_matrix.to_dense()
        old = full_targets[..., : full_targets.shape[-1] - targets.shape[-1]]
        residual = torch.cat((old, targets), dim=-1) - full_output.mean
        lower = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(residual.unsqueeze(-1), lower).squeeze(-1)
        return alpha, torch.linalg.solve_triangular(lower, torch.ones_like(k[..., :1]), upper=False).square().sum(-2)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        strategy = trained(problem, generator)
        kernel, (x,) = strategy.train_prior_dist.lazy_covariance_matrix.kernel, strategy.train_inputs
        new = random_matrix(problem, generator, problem.m, problem.d)
        imagined = torch.linspace(-1, 1, problem.rhs, device="cpu").to(new).view(-1, *[1] * (new.dim() - 1))
        targets = new.sum(-1).sin() + 0.1 * (imagined if problem.rhs > 1 else 0.0)
        full_x = torch.cat((x.expand(*new.shape[:-2], -1, -1), new), dim=-2)
        full_y = torch.cat((strategy.train_labels.expand(*targets.shape[:-1], -1), targets), dim=-1)
        targets = targets.contiguous().requires_grad_(bool(problem.grad))
        with torch.set_grad_enabled(bool(problem.grad)):
            covariance = LazyEvaluatedKernelTensor(full_x, full_x, kernel=kernel)
            output = MultivariateNormal(torch.zeros_like(full_x[..., 0]), covariance)
        strategy.cold = False  # a fantasy starts from the caches of earlier predictions
        return (Update(strategy, [new], targets, [full_x], full_y, output, None, not iterates(problem)),)

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        full = level == "full"
        base = Problem(op="fantasy", d=6, rhs=1, dtype=dtype, device=device, variant="cholesky")
        sizes = [(1, 200), (1, 700), (2, 60)] + ([(4, 400), (1, 20), (8, 100)] if full else [])
        iterated = [(1, 1000)] + ([(2, 1600), (1, 3200)] if full else [])
        problems = [base.replace(m=q, n=n) for q, n in sizes]
        problems += [base.replace(m=q, n=n, variant="lanczos/cg") for q, n in iterated]
        batches = [(1, 4, 16, 200)] + ([(2, 1, 4, 100), (1, 16, 1, 50), (1, 10, 64, 30)] if full else [])
        imagined = [base.replace(m=q, batch=b, rhs=f, n=n) for q, b, f, n in batches]
        return problems + [p.replace(grad="x") for p in imagined] + imagined * full

    def features(self, problem: Problem) -> Features:
        elements = problem.batch * (problem.n + problem.m) ** 2
        flops = elements * (100.0 if iterates(problem) else 4.0 * problem.n)
        return Features(200.0, flops, 12.0 * elements * problem.itemsize)

    def memory(self, problem: Problem) -> int:
        return (3 * problem.n**2 + 4 * problem.batch * problem.rhs * problem.m * problem.n) * problem.itemsize + 2**22

    def canonical(self, out: Any) -> Any:
        return out[0]

    def materialize(self, out: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(out, DefaultPredictionStrategy):
            return out
        with gpytorch.settings.detach_test_caches(False):  # as BoTorch reads caches
            known = factor_cache.found(out)
            if known is not None:
                return known.alpha, known.explained(known.alpha.new_ones(1, known.n))
            alpha = get_from_cache(out, "mean_cache")  # as the update computed it, with its graph
            return alpha, (alpha.new_ones(1, alpha.shape[-1]) @ out.covar_cache).square().sum(-1)

    def default_candidate(self, problem: Problem) -> str:
        return "rows"


FANTASY = _Fantasy()


@FANTASY.candidate("stock", memory=lambda p: 6 * p.batch * (p.n + p.m) ** 2 * p.itemsize)
def stock(update: Update) -> Any:
    """gpytorch's own; its mean cache is kept, which the library would not find again (gpytorch #2669)."""
    strategy, *data, noise, exact = update
    with as_asked(exact, strategy.num_train):
        made = libraries.get_fantasy_strategy(strategy, *data, **({} if noise is None else {"noise": noise}))
    factor_cache.keep_mean(made, get_from_cache(made, "mean_cache"))
    return made


@FANTASY.candidate("rows", accuracy="better", parts=True)
def rows(update: Update) -> Any:
    """New rows of the inverse factor, O(q n^2); old rows are shared, not copied; exact at any size."""
    strategy, inputs, targets, full_inputs, full_targets, full_output, noise, _ = update
    graph = bool(_graph(full_inputs, targets)) or gpytorch.settings.detach_test_caches.off()
    n, mean, covariance = strategy.num_train, full_output.mean, full_output.lazy_covariance_matrix
    with torch.set_grad_enabled(graph and torch.is_grad_enabled()):
        known = factor_cache.of(strategy, graph=graph)
        assert known is not None
        more = {} if noise is None else {"noise": noise}
        likelihood = strategy.likelihood.get_fantasy_likelihood(**more)
        new = MultivariateNormal(mean[..., n:], covariance[..., n:, n:])
        corner = likelihood(new, inputs, **more).covariance_matrix
        grown = known.extended(evaluated(covariance[..., n:, :n]), corner, targets - mean[..., n:])
    strategy.fantasy_inputs, strategy.fantasy_targets = inputs, targets
    if full_inputs[0].dim() <= full_targets.dim():  # several observations at the same points
        repeats = full_targets.shape[:1]
        covariance = BatchRepeatLinearOperator(covariance, torch.Size([*repeats, *[1] * (mean.dim() - 1)]))
        full_inputs = [x.expand(*repeats, *x.shape) for x in full_inputs]
        mean = mean.expand(*repeats, *mean.shape)
    prior = MultivariateNormal(mean, covariance)
    made = strategy.__class__(
        train_inputs=full_inputs, train_prior_dist=prior, train_labels=full_targets, likelihood=likelihood
    )
    factor_cache.attach(made, grown, attached=grown is not None and grown.requires_grad)
    return made
