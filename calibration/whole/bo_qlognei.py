"""BoTorch: noisy observations, pairs of points by qLogNEI, n from 30 to 38."""

import torch
from botorch.acquisition import qLogNoisyExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import Ackley
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(2)
problem = Ackley(dim=4, noise_std=0.3, negate=True, bounds=[(-2.0, 3.0)] * 4).double()
bounds = torch.stack([torch.zeros(4), torch.ones(4)]).double()


def observe(x):
    return problem(-2.0 + 5.0 * x).unsqueeze(-1)


x = torch.rand(30, 4, dtype=torch.float64)
y = observe(x)
for seed in range(4):
    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=seed)
    acquisition = qLogNoisyExpectedImprovement(model, X_baseline=x, sampler=sampler, prune_baseline=True)
    new, _ = optimize_acqf(acquisition, bounds, q=2, num_restarts=4, raw_samples=64)
    x, y = torch.cat([x, new]), torch.cat([y, observe(new)])
print("final", model.posterior(x).mean.max().item(), model.likelihood.noise.item())
