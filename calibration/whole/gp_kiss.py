"""GPyTorch: KISS-GP on 1,000 points and a grid of 100, 30 steps of Adam, float32."""

import gpytorch
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.GridInterpolationKernel(
            gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()), grid_size=100, num_dims=1
        )

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = torch.linspace(0, 1, 1000)
y = torch.sin(25.0 * x) + 0.2 * torch.randn(1000)
new = torch.linspace(0, 1, 51)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Model(x, y, likelihood)
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(30):
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
