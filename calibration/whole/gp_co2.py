"""GPyTorch: trend, seasons and irregularities as a sum of four kernels on 400 months, 60 steps, a forecast."""

import gpytorch
import torch
from gpytorch.kernels import LinearKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        seasons = ScaleKernel(PeriodicKernel() * RBFKernel())
        self.covar_module = ScaleKernel(RBFKernel()) + seasons + ScaleKernel(RQKernel()) + ScaleKernel(LinearKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
months = torch.arange(400, dtype=torch.float64) / 12
y = 0.1 * months + torch.sin(2 * torch.pi * months) + 0.1 * torch.randn(400, dtype=torch.float64)
y = (y - y.mean()) / y.std()
likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
model = Model(months, y, likelihood).double()
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for _ in range(60):
    optimizer.zero_grad()
    loss = -mll(model(months), y)
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    forecast = likelihood(model(33 + torch.arange(60, dtype=torch.float64) / 12))
print("final", loss.item(), forecast.mean.mean().item(), forecast.variance.mean().item())
