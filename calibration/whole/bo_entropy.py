"""BoTorch: max-value entropy search over 500 candidate maxima, Branin with noise, n from 20 to 32."""

import torch
from botorch.acquisition.max_value_entropy_search import qMaxValueEntropy
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(7)
problem = Branin(noise_std=0.1, negate=True).double()
lower, upper = problem.bounds
unit = torch.stack([torch.zeros(2), torch.ones(2)]).double()
x = torch.rand(20, 2, dtype=torch.float64)
y = problem(lower + (upper - lower) * x).unsqueeze(-1)
for _ in range(12):
    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    acquisition = qMaxValueEntropy(model, torch.rand(500, 2, dtype=torch.float64))
    new, _ = optimize_acqf(acquisition, unit, q=1, num_restarts=10, raw_samples=256, options={"maxiter": 100})
    x, y = torch.cat([x, new]), torch.cat([y, problem(lower + (upper - lower) * new).unsqueeze(-1)])
print("final", y.max().item(), model.covar_module.lengthscale.mean().item())
