"""BoTorch: MultiTaskGP, a cheap and a dear task, LogEI on the dear one, n from 40 to 43."""

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import MultiTaskGP
from botorch.optim import optimize_acqf
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(7)
bounds = torch.stack([torch.zeros(3), torch.ones(3)]).double()


def observe(x):
    main = torch.sin(6.0 * x[:, :3]).sum(-1)
    return torch.where(x[:, 3] > 0.5, main + 0.3 * torch.cos(9.0 * x[:, 0]), main).unsqueeze(-1)


x = torch.cat(
    [torch.rand(40, 3), torch.arange(40).remainder(4).ge(3).float().unsqueeze(-1).neg().add(1.0)], -1
).double()
y = observe(x)
for _ in range(3):
    model = MultiTaskGP(x, y, task_feature=-1, output_tasks=[0])
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    acquisition = LogExpectedImprovement(model, best_f=y[x[:, 3] == 0].max())
    new, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=4, raw_samples=64)
    new = torch.cat([new, torch.zeros(1, 1, dtype=torch.float64)], -1)
    x, y = torch.cat([x, new]), torch.cat([y, observe(new)])
print("final", y[x[:, 3] == 0].max().item(), model.likelihood.noise.mean().item())
