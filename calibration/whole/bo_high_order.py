"""BoTorch: outputs on a grid of 8 x 8 by a HigherOrderGP, a composite objective, qLogEI, n from 20 to 22."""

import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.acquisition.objective import GenericMCObjective
from botorch.fit import fit_gpytorch_mll
from botorch.models import HigherOrderGP
from botorch.optim import optimize_acqf
from botorch.sampling import IIDNormalSampler
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(2)
grid = torch.linspace(0, 1, 8, dtype=torch.float64)


def observe(x):
    a, b, c = (x[..., i, None, None] for i in range(3))
    return torch.exp(-((grid[:, None] - a) ** 2 + (grid - b) ** 2) / (0.05 + 0.2 * c))


truth = observe(torch.tensor([[0.3, 0.6, 0.4]], dtype=torch.float64))
unit = torch.stack([torch.zeros(3), torch.ones(3)]).double()
x = torch.rand(20, 3, dtype=torch.float64)
y = observe(x)
objective = GenericMCObjective(lambda samples, X=None: -(samples - truth).square().sum((-2, -1)))
for _ in range(2):
    model = HigherOrderGP(x, y)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 20}})
    acquisition = qLogExpectedImprovement(
        model, objective(y).max(), sampler=IIDNormalSampler(torch.Size([32]), seed=3), objective=objective
    )
    new, _ = optimize_acqf(acquisition, unit, q=1, num_restarts=2, raw_samples=16, options={"maxiter": 20})
    x, y = torch.cat([x, new]), torch.cat([y, observe(new)])
print("final", objective(y).max().item())
