"""BoTorch: six correlated outputs by a KroneckerMultiTaskGP, a composite objective, pairs by qLogEI, n from 20 on."""

import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.acquisition.objective import GenericMCObjective
from botorch.fit import fit_gpytorch_mll
from botorch.models import KroneckerMultiTaskGP
from botorch.optim import optimize_acqf
from botorch.sampling import IIDNormalSampler
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(1)
times = torch.linspace(0, 1, 6, dtype=torch.float64)
target = torch.sin(4 * times) + 0.5 * times


def observe(x):
    return torch.sin((3 + x[:, :1]) * times + x[:, 1:2]) + x[:, 2:3] * times


unit = torch.stack([torch.zeros(4), torch.ones(4)]).double()
x = torch.rand(20, 4, dtype=torch.float64)
y = observe(x)
objective = GenericMCObjective(lambda samples, X=None: -(samples - target).square().sum(-1))
for _ in range(3):
    model = KroneckerMultiTaskGP(x, y)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 150}})
    best = objective(y).max()
    acquisition = qLogExpectedImprovement(
        model, best, sampler=IIDNormalSampler(torch.Size([64]), seed=2), objective=objective
    )
    new, _ = optimize_acqf(acquisition, unit, q=2, num_restarts=4, raw_samples=32, options={"maxiter": 40})
    x, y = torch.cat([x, new]), torch.cat([y, observe(new)])
print("final", objective(y).max().item())
