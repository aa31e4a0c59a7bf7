"""GPyTorch: a sum of one RBF kernel for each of four inputs, 200 points, 60 steps of Adam."""

import gpytorch
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        parts = [gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(active_dims=[i])) for i in range(4)]
        self.covar_module = parts[0] + parts[1] + parts[2] + parts[3]

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = torch.rand(200, 4, dtype=torch.float64)
y = torch.sin(6.0 * x).sum(-1) + 0.1 * torch.randn(200, dtype=torch.float64)
new = torch.rand(100, 4, dtype=torch.float64)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Model(x, y, likelihood).double()
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(60):
    optimizer.zero_grad()
    loss = -mll(model(x), y)
    loss.backward()
    optimizer.step()
model.eval()
likelihood.eval()
with torch.no_grad(), gpytorch.settings.fast_pred_var():
    prediction = likelihood(model(new))
    lower, upper = prediction.confidence_region()
print("final", loss.item(), prediction.mean.sum().item(), (upper - lower).mean().item())
