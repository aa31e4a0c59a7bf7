"""BoTorch: an orthogonal additive kernel in six dimensions, LogEI, n from 40 to 44."""

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.kernels.orthogonal_additive_kernel import OrthogonalAdditiveKernel
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.test_functions import Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(13)
problem = Hartmann(negate=True).double()
unit = torch.stack([torch.zeros(6), torch.ones(6)]).double()
x = torch.rand(40, 6, dtype=torch.float64)
y = problem(x).unsqueeze(-1)
for _ in range(4):
    kernel = OrthogonalAdditiveKernel(dim=6, second_order=True, dtype=torch.float64)
    model = SingleTaskGP(x, y, covar_module=kernel, outcome_transform=Standardize(m=1))
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 60}})
    acquisition = LogExpectedImprovement(model, y.max())
    new, _ = optimize_acqf(acquisition, unit, q=1, num_restarts=4, raw_samples=64, options={"maxiter": 60})
    x, y = torch.cat([x, new]), torch.cat([y, problem(new).unsqueeze(-1)])
print("final", y.max().item())
