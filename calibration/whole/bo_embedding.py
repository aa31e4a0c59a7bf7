"""BoTorch: 500 dimensions of which two matter, LogEI on an isotropic kernel, n from 20 to 24."""

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(9)
dim = 500
problem = Branin(negate=True).double()
lower, upper = problem.bounds
unit = torch.stack([torch.zeros(dim), torch.ones(dim)]).double()


def observe(x):
    return problem(lower + (upper - lower) * x[:, [3, 141]]).unsqueeze(-1)


x = torch.rand(20, dim, dtype=torch.float64)
y = observe(x)
for _ in range(4):
    model = SingleTaskGP(x, y, outcome_transform=Standardize(m=1))
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 50}})
    acquisition = LogExpectedImprovement(model, y.max())
    new, _ = optimize_acqf(acquisition, unit, q=1, num_restarts=5, raw_samples=64, options={"maxiter": 100})
    x, y = torch.cat([x, new]), torch.cat([y, observe(new)])
print("final", y.max().item())
