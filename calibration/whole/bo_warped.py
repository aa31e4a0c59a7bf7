"""BoTorch: inputs warped by learned Kumaraswamy distributions, qLogNEI, Hartmann 6, n from 25 to 33."""

import torch
from botorch.acquisition import qLogNoisyExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.models.transforms.input import Warp
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior

torch.manual_seed(14)
problem = Hartmann(negate=True).double()
unit = torch.stack([torch.zeros(6), torch.ones(6)]).double()


def observe(x):
    value = problem(x**1.5)
    return (value + 0.05 * torch.randn_like(value)).unsqueeze(-1)


x = torch.rand(25, 6, dtype=torch.float64)
y = observe(x)
for _ in range(4):
    warp = Warp(
        d=6,
        indices=list(range(6)),
        concentration1_prior=LogNormalPrior(0.0, 0.75**0.5),
        concentration0_prior=LogNormalPrior(0.0, 0.75**0.5),
    )
    model = SingleTaskGP(x, y, outcome_transform=Standardize(m=1), input_transform=warp)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    acquisition = qLogNoisyExpectedImprovement(
        model, x, sampler=SobolQMCNormalSampler(torch.Size([64]), seed=1), prune_baseline=True
    )
    new, _ = optimize_acqf(acquisition, unit, q=2, num_restarts=4, raw_samples=64, options={"maxiter": 60})
    x, y = torch.cat([x, new]), torch.cat([y, observe(new)])
print("final", y.max().item(), model.covar_module.lengthscale.mean().item())
