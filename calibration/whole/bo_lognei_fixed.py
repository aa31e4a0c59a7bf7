"""BoTorch: known noise of each observation, LogNEI, n from 25 to 31."""

import torch
from botorch.acquisition import LogNoisyExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(4)
problem = Branin(negate=True).double()
bounds = torch.stack([torch.zeros(2), torch.ones(2)]).double()


def observe(x):
    lower, upper = problem.bounds
    exact = problem(lower + (upper - lower) * x).unsqueeze(-1)
    return exact + 2.0 * torch.randn_like(exact)


x = torch.rand(25, 2, dtype=torch.float64)
y = observe(x)
for _ in range(6):
    scale = y.std()
    model = SingleTaskGP(
        x, (y - y.mean()) / scale, train_Yvar=torch.full_like(y, 4.0) / scale**2, outcome_transform=None
    )
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    acquisition = LogNoisyExpectedImprovement(model, x, num_fantasies=8)
    new, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=4, raw_samples=64)
    x, y = torch.cat([x, new]), torch.cat([y, observe(new)])
print("final", y.max().item(), model.covar_module.lengthscale.mean().item())
