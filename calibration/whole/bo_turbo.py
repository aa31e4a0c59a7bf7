"""BoTorch: TuRBO, batches of 50 by Thompson sampling in a trust region, n from 100 to 500, 10 dimensions."""

import gpytorch
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.generation import MaxPosteriorSampling
from botorch.models import SingleTaskGP
from botorch.test_functions import Ackley
from gpytorch.constraints import Interval
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch.quasirandom import SobolEngine

torch.manual_seed(9)
d, batch = 10, 50
problem = Ackley(dim=d, negate=True, bounds=[(-5.0, 10.0)] * d).double()


def observe(x):
    return problem(-5.0 + 15.0 * x).unsqueeze(-1)


x = SobolEngine(d, scramble=True, seed=0).draw(100, dtype=torch.float64).to(torch.get_default_device())
y = observe(x)
length = 0.8
while len(x) < 500:
    scaled = (y - y.mean()) / y.std()
    likelihood = GaussianLikelihood(noise_constraint=Interval(1e-8, 1e-3))
    kernel = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=d, lengthscale_constraint=Interval(0.005, 4.0)))
    model = SingleTaskGP(x, scaled, covar_module=kernel, likelihood=likelihood, outcome_transform=None)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    with gpytorch.settings.max_cholesky_size(float("inf")):
        fit_gpytorch_mll(mll)
        weights = kernel.base_kernel.lengthscale.squeeze().detach()
        weights = weights / weights.mean()
        center = x[y.argmax()]
        lower, upper = (torch.clamp(center + side * weights * length / 2.0, 0.0, 1.0) for side in (-1, 1))
        points = lower + (upper - lower) * SobolEngine(d, scramble=True, seed=len(x)).draw(
            1000, dtype=torch.float64
        ).to(x)
        candidates = torch.where(torch.rand(1000, d) <= 0.5, points, center)
        with torch.no_grad():
            new = MaxPosteriorSampling(model, replacement=False)(candidates, num_samples=batch)
    value = observe(new)
    length = min(1.6, length * 1.2) if value.max() > y.max() else length / 1.5
    x, y = torch.cat([x, new]), torch.cat([y, value])
print("final", y.max().item(), weights.max().item())
