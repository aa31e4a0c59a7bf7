"""BoTorch: batches of five points by GIBBON, one after the other, Hartmann 6, n from 30 to 50."""

import torch
from botorch.acquisition.max_value_entropy_search import qLowerBoundMaxValueEntropy
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(3)
problem = Hartmann(negate=True).double()
unit = torch.stack([torch.zeros(6), torch.ones(6)]).double()
x = torch.rand(30, 6, dtype=torch.float64)
y = problem(x).unsqueeze(-1)
for _ in range(4):
    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    acquisition = qLowerBoundMaxValueEntropy(model, torch.rand(1000, 6, dtype=torch.float64))
    new, _ = optimize_acqf(acquisition, unit, q=5, num_restarts=5, raw_samples=128, sequential=True)
    x, y = torch.cat([x, new]), torch.cat([y, problem(new).unsqueeze(-1)])
print("final", y.max().item(), model.covar_module.lengthscale.mean().item())
