"""BoTorch: constrained TuRBO, batches of 10 by Thompson sampling from 2,000 points, 10 dimensions, n from 40 to 100."""

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.generation.sampling import ConstrainedMaxPosteriorSampling
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.test_functions import Ackley
from gpytorch.constraints import Interval
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch.quasirandom import SobolEngine

torch.manual_seed(8)
dim = 10
problem = Ackley(dim=dim, negate=True).double()
lower, upper = problem.bounds


def observe(x):
    points = lower + (upper - lower) * x
    return problem(points).unsqueeze(-1), points.sum(-1, keepdim=True), points.norm(dim=-1, keepdim=True) - 5


def fitted(x, y):
    kernel = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=dim, lengthscale_constraint=Interval(0.005, 4.0)))
    likelihood = GaussianLikelihood(noise_constraint=Interval(1e-8, 1e-3))
    model = SingleTaskGP(x, y, covar_module=kernel, likelihood=likelihood, outcome_transform=Standardize(m=1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


x = SobolEngine(dim, scramble=True, seed=1).draw(40).double()
y, c1, c2 = observe(x)
length = 0.8
for turn in range(6):
    model = fitted(x, y)
    limits = ModelListGP(fitted(x, c1), fitted(x, c2))
    feasible = (c1 <= 0).squeeze(-1) & (c2 <= 0).squeeze(-1)
    score = torch.where(feasible, y.squeeze(-1), y.min() - c1.clamp_min(0).squeeze(-1) - c2.clamp_min(0).squeeze(-1))
    centre = x[score.argmax()]
    low, high = (centre - length / 2).clamp(0, 1), (centre + length / 2).clamp(0, 1)
    moved = low + (high - low) * SobolEngine(dim, scramble=True, seed=turn).draw(2000).double()
    candidates = torch.where(torch.rand(2000, dim, dtype=torch.float64) <= 0.5, moved, centre)
    with torch.no_grad():
        new = ConstrainedMaxPosteriorSampling(model, limits, replacement=False)(candidates, num_samples=10)
    found = observe(new)
    x, y, c1, c2 = torch.cat([x, new]), torch.cat([y, found[0]]), torch.cat([c1, found[1]]), torch.cat([c2, found[2]])
    length *= 0.9
print("final", y.max().item(), c1.min().item())
