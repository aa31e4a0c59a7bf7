"""BoTorch: an upper confidence bound in 20 dimensions, n from 40 to 44."""

import torch
from botorch.acquisition import UpperConfidenceBound
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Rosenbrock
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(3)
d = 20
problem = Rosenbrock(dim=d, negate=True).double()
bounds = torch.stack([torch.zeros(d), torch.ones(d)]).double()


def observe(x):
    return problem(-2.0 + 4.0 * x).unsqueeze(-1) / 1e4


x = torch.rand(40, d, dtype=torch.float64)
y = observe(x)
for _ in range(4):
    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    new, _ = optimize_acqf(UpperConfidenceBound(model, beta=2.0), bounds, q=1, num_restarts=4, raw_samples=64)
    x, y = torch.cat([x, new]), torch.cat([y, observe(new)])
print("final", y.max().item(), model.covar_module.lengthscale.mean().item())
