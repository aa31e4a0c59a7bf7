"""GPyTorch: a rational quadratic kernel trained by the leave-one-out likelihood, 150 points, 80 steps of Adam."""

import gpytorch
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.LinearMean(2)
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RQKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = torch.rand(150, 2, dtype=torch.float64)
y = torch.sin(5 * x).sum(-1) + 0.1 * torch.randn(150, dtype=torch.float64)
likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
model = Model(x, y, likelihood).double()
mll = gpytorch.mlls.LeaveOneOutPseudoLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for _ in range(80):
    optimizer.zero_grad()
    loss = -mll(model(x), y)
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    prediction = likelihood(model(torch.rand(200, 2, dtype=torch.float64)))
print("final", loss.item(), prediction.mean.mean().item(), prediction.variance.mean().item())
