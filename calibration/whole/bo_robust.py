"""BoTorch: regression with outliers found by relevance pursuit, 60 points of which 8 are corrupt."""

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models.robust_relevance_pursuit_model import RobustRelevancePursuitSingleTaskGP
from botorch.models.transforms import Standardize
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(12)
x = torch.rand(60, 1, dtype=torch.float64)
y = torch.sin(6 * x) + 0.05 * torch.randn_like(x)
y[:8] += 3 * torch.randn(8, 1, dtype=torch.float64)
model = RobustRelevancePursuitSingleTaskGP(train_X=x, train_Y=y, outcome_transform=Standardize(m=1))
fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
grid = torch.linspace(0, 1, 100, dtype=torch.float64).unsqueeze(-1)
error = (model.posterior(grid).mean - torch.sin(6 * grid)).square().mean().sqrt()
print("final", error.item())
