"""BoTorch: Thompson sampling from 1,000 candidates, n from 50 to 80."""

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.generation import MaxPosteriorSampling
from botorch.models import SingleTaskGP
from botorch.test_functions import Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch.quasirandom import SobolEngine

torch.manual_seed(10)
problem = Hartmann(negate=True).double()
x = torch.rand(50, 6, dtype=torch.float64)
y = problem(x).unsqueeze(-1)
for seed in range(6):
    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    candidates = SobolEngine(6, scramble=True, seed=seed).draw(1000, dtype=torch.float64).to(x)
    with torch.no_grad():
        new = MaxPosteriorSampling(model, replacement=False)(candidates, num_samples=5)
    x, y = torch.cat([x, new]), torch.cat([y, problem(new).unsqueeze(-1)])
print("final", y.max().item(), model.covar_module.lengthscale.mean().item())
