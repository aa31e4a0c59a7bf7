"""GPyTorch: exact training on 1,500 points in six dimensions, 10 steps of Adam."""

import gpytorch
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(2.5, ard_num_dims=6))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = torch.rand(1500, 6, dtype=torch.float64)
y = torch.sin(3.0 * x).sum(-1) + 0.1 * torch.randn(1500, dtype=torch.float64)
new = torch.rand(200, 6, dtype=torch.float64)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Model(x, y, likelihood).double()
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(10):
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
