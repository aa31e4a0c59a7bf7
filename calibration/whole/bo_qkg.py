"""BoTorch: the knowledge gradient with 16 fantasies, n from 20 to 22."""

import torch
from botorch.acquisition import qKnowledgeGradient
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(11)
problem = Branin(negate=True).double()
bounds = torch.stack([torch.zeros(2), torch.ones(2)]).double()


def observe(x):
    lower, upper = problem.bounds
    return problem(lower + (upper - lower) * x).unsqueeze(-1)


x = torch.rand(20, 2, dtype=torch.float64)
y = observe(x)
for _ in range(2):
    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    acquisition = qKnowledgeGradient(model, num_fantasies=16)
    new, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=4, raw_samples=32, options={"maxiter": 50})
    x, y = torch.cat([x, new]), torch.cat([y, observe(new)])
print("final", y.max().item(), model.covar_module.lengthscale.mean().item())
