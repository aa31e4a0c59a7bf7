"""BoTorch: MixedSingleTaskGP with one categorical input, LogEI, n from 30 to 32."""

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import MixedSingleTaskGP
from botorch.optim import optimize_acqf_mixed
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(8)
bounds = torch.stack([torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, 2.0])]).double()


def observe(x):
    return (torch.sin(5.0 * x[:, :3] + x[:, 3:]).sum(-1) - 0.2 * x[:, 3]).unsqueeze(-1)


x = torch.cat([torch.rand(30, 3), torch.arange(30).remainder(3).float().unsqueeze(-1)], -1).double()
y = observe(x)
for _ in range(2):
    model = MixedSingleTaskGP(x, y, cat_dims=[3])
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    acquisition = LogExpectedImprovement(model, best_f=y.max())
    choices = [{3: 0.0}, {3: 1.0}, {3: 2.0}]
    new, _ = optimize_acqf_mixed(acquisition, bounds, q=1, num_restarts=3, raw_samples=32, fixed_features_list=choices)
    x, y = torch.cat([x, new]), torch.cat([y, observe(new)])
print("final", y.max().item(), model.likelihood.noise.item())
