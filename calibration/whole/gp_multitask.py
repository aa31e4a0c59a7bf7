"""GPyTorch: two tasks on 100 points by Kronecker products, 50 steps of Adam, float32, as in the tutorial."""

import gpytorch
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=2)
        self.covar_module = gpytorch.kernels.MultitaskKernel(gpytorch.kernels.RBFKernel(), num_tasks=2, rank=1)

    def forward(self, x):
        return gpytorch.distributions.MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = torch.linspace(0, 1, 100)
y = torch.stack([torch.sin(6.283 * x), torch.cos(6.283 * x)], -1) + 0.2 * torch.randn(100, 2)
likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
model = Model(x, y, likelihood)
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(50):
    optimizer.zero_grad()
    loss = -mll(model(x), y)
    loss.backward()
    optimizer.step()
model.eval()
likelihood.eval()
with torch.no_grad(), gpytorch.settings.fast_pred_var():
    prediction = likelihood(model(torch.linspace(0, 1, 51)))
    lower, upper = prediction.confidence_region()
print("final", loss.item(), prediction.mean.sum().item(), (upper - lower).mean().item())
