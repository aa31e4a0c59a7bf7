"""BoTorch: an objective and a constraint as two outputs of one model, qLogEI, n from 30 to 38."""

import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.acquisition.objective import GenericMCObjective
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(6)
bounds = torch.stack([torch.zeros(3), torch.ones(3)]).double()


def observe(x):
    return torch.stack([torch.sin(5.0 * x).sum(-1), x.square().sum(-1) - 1.2], dim=-1)


x = torch.rand(30, 3, dtype=torch.float64)
y = observe(x)
for seed in range(4):
    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    acquisition = qLogExpectedImprovement(
        model,
        best_f=y[y[:, 1] <= 0, 0].max(),
        objective=GenericMCObjective(lambda samples, X=None: samples[..., 0]),
        constraints=[lambda samples: samples[..., 1]],
        sampler=SobolQMCNormalSampler(torch.Size([64]), seed=seed),
    )
    new, _ = optimize_acqf(acquisition, bounds, q=2, num_restarts=4, raw_samples=64)
    x, y = torch.cat([x, new]), torch.cat([y, observe(new)])
print("final", y[:, 0].max().item(), model.covar_module.lengthscale.mean().item())
