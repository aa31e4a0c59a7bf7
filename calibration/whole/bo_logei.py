"""BoTorch: eight rounds of LogEI on Hartmann 6, from 20 points, as in the first tutorial."""

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(0)
problem = Hartmann(negate=True).double()
x = torch.rand(20, 6, dtype=torch.float64)
y = problem(x).unsqueeze(-1)
bounds = torch.stack([torch.zeros(6), torch.ones(6)]).double()
for _ in range(8):
    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    acquisition = LogExpectedImprovement(model, best_f=y.max())
    new, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=8, raw_samples=128)
    x, y = torch.cat([x, new]), torch.cat([y, problem(new).unsqueeze(-1)])
print("final", y.max().item(), model.covar_module.lengthscale.mean().item())
