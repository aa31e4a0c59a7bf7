"""BoTorch: batches of four points by qLogEI, inputs normalised, n from 30 to 42."""

import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import Levy
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(1)
problem = Levy(dim=5, negate=True).double()
lower, upper = bounds = problem.bounds
x = lower + (upper - lower) * torch.rand(30, 5, dtype=torch.float64)
y = problem(x).unsqueeze(-1)
for seed in range(3):
    model = SingleTaskGP(x, y, input_transform=Normalize(5), outcome_transform=Standardize(1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=seed)
    acquisition = qLogExpectedImprovement(model, best_f=y.max(), sampler=sampler)
    new, _ = optimize_acqf(acquisition, bounds, q=4, num_restarts=4, raw_samples=64)
    x, y = torch.cat([x, new]), torch.cat([y, problem(new).unsqueeze(-1)])
print("final", y.max().item(), model.likelihood.noise.item())
