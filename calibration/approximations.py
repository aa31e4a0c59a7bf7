"""What approximates a large exact model, for `baselines.py`: gpytorch's SVGP and SGPR, and a Falkon-style ridge.

All of them begin with the hyperparameters of an exact model of a few points. Nothing here imports autokern.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import gpytorch
import torch
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from torch import Tensor
from workloads import Regression

Forecast = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""From points to the means and variances of noisy values there; None where a method has no variances."""

BATCH, VARIATIONAL_RATE, INDUCING_RATE = 1024, 0.01, 0.03
ELEMENTS = 2**23
"""Elements of a block of a kernel matrix."""
JITTER = 1e-8
"""Share of the variance that is added to the covariance of Falkon's centres."""
RESIDUAL, MOST = 1e-4, 50
"""Relative residual at which Falkon's conjugate gradients end, and their most iterations."""


class Variational(gpytorch.models.ApproximateGP):
    """A sparse variational model (Hensman et al. 2015) with learned inducing points."""

    def __init__(self, points: Tensor, like: Regression) -> None:
        distribution = CholeskyVariationalDistribution(len(points))
        super().__init__(VariationalStrategy(self, points, distribution, learn_inducing_locations=True))
        self.mean_module, self.covar_module = like.mean_module, like.covar_module

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """Return the prior at `x`."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def noisy_forecast(model: Any, likelihood: Any) -> Forecast:
    """Return the forecasts of a model of gpytorch, some points at a time."""

    def forecast(points: Tensor) -> tuple[Tensor, Tensor]:
        model.eval()
        likelihood.eval()
        with torch.no_grad():
            parts = [likelihood(model(some)) for some in points.split(1024)]
        return torch.cat([part.mean for part in parts]), torch.cat([part.variance for part in parts])

    return forecast


def variational(like: Regression, x: Tensor, y: Tensor, inducing: int) -> Iterator[Forecast]:
    """Yield forecasts after each step of Adam on the bound of a minibatch."""
    model = Variational(x[:inducing].clone(), like).to(x)
    likelihood = like.likelihood
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    parameters = {id(p): p for p in (*model.parameters(), *likelihood.parameters())}
    optimizer = torch.optim.Adam(parameters.values(), lr=VARIATIONAL_RATE)
    generator = torch.Generator().manual_seed(0)
    while True:
        for rows in torch.randperm(len(x), generator=generator).split(BATCH):
            model.train()
            likelihood.train()
            optimizer.zero_grad()
            (-bound(model(x[rows]), y[rows])).backward()
            optimizer.step()
            yield noisy_forecast(model, likelihood)


def sparse(like: Regression, x: Tensor, y: Tensor, inducing: int) -> Iterator[Forecast]:
    """Yield forecasts of SGPR (Titsias 2009) after each step of Adam on the bound of all points."""
    base, likelihood = like.covar_module, like.likelihood
    kernel = gpytorch.kernels.InducingPointKernel(base, x[:inducing].clone(), likelihood)
    model = Regression(x, y, kernel)
    model.likelihood, model.mean_module = likelihood, like.mean_module
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=INDUCING_RATE)
    while True:
        yield noisy_forecast(model, likelihood)
        model.train()
        likelihood.train()
        optimizer.zero_grad()
        (-objective(model(x), y)).backward()
        optimizer.step()


@torch.no_grad()
def falkon(like: Regression, x: Tensor, y: Tensor, centres: int) -> Iterator[Forecast]:
    """Yield forecasts of Falkon (Rudi et al. 2017) after each iteration of its conjugate gradients.

    It solves ``(K_nm^T K_nm + s K_mm) a = K_nm^T y``, s the noise, with ``K_mm (n / m K_mm + s I)`` as preconditioner.
    Blocks of the kernel matrix are in the precision of the points, the rest is in float64.
    """
    noise, mean = like.likelihood.noise.item(), like.mean_module.constant.item()
    chosen = x[:centres]

    def block(rows: Tensor) -> Tensor:
        return like.covar_module(rows, chosen).to_dense()

    square = copy.deepcopy(like.covar_module).double()(chosen.double()).to_dense()
    square.diagonal().mul_(1 + JITTER)
    first = torch.linalg.cholesky(square).mT
    inner = (first @ first.mT).mul_(len(x) / centres)
    inner.diagonal().add_(noise)
    second = torch.linalg.cholesky(inner).mT
    del inner, square

    def solve(factor: Tensor, vector: Tensor, transposed: bool = False) -> Tensor:
        return torch.linalg.solve_triangular(factor.mT if transposed else factor, vector, upper=not transposed)

    def gram(vector: Tensor | None) -> Tensor:
        """Return ``K_nm^T K_nm`` times a vector; without one, ``K_nm^T y``."""
        total = torch.zeros(centres, 1, dtype=torch.float64)
        for rows in torch.arange(len(x)).split(max(1, ELEMENTS // centres)):
            part = block(x[rows])
            image = (y[rows] - mean).unsqueeze(-1) if vector is None else part @ vector.to(part)
            total += (part.mT @ image).double()
        return total

    def product(vector: Tensor) -> Tensor:
        whole = solve(second, vector)
        back = solve(first, gram(solve(first, whole)), transposed=True) + noise * whole
        return solve(second, back, transposed=True)

    rhs = solve(second, solve(first, gram(None), transposed=True), transposed=True)
    found, residual = torch.zeros_like(rhs), rhs.clone()
    direction, square_norm = residual.clone(), residual.square().sum()
    start = math.sqrt(square_norm.item())
    for _ in range(MOST):
        image = product(direction)
        step = square_norm / (direction * image).sum()
        found += step * direction
        residual -= step * image
        before, square_norm = square_norm, residual.square().sum()
        direction = residual + square_norm / before * direction
        coefficients = solve(first, solve(second, found)).to(x)
        yield lambda points, a=coefficients: (mean + (block(points) @ a).squeeze(-1), None)
        if math.sqrt(square_norm.item()) < RESIDUAL * start:
            return


METHODS: dict[str, Callable[[Regression, Tensor, Tensor, int], Iterator[Forecast]]] = {
    "SVGP": variational,
    "SGPR": sparse,
    "Falkon": falkon,
}
