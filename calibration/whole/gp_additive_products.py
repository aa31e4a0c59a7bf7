"""GPyTorch: a sum of products of one-dimensional kernels over pairs of ten inputs, 200 points, 60 steps, float32."""

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        products = [RBFKernel(active_dims=(i,)) * MaternKernel(2.5, active_dims=(i + 1,)) for i in range(0, 10, 2)]
        pairs = [ScaleKernel(product) for product in products]
        self.covar_module = sum(pairs[1:], pairs[0])

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = torch.rand(200, 10)
y = torch.sin(4 * x[:, 0] * x[:, 1]) + x[:, 2] + 0.1 * torch.randn(200)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Model(x, y, likelihood)
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(60):
    optimizer.zero_grad()
    loss = -mll(model(x), y)
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    test = torch.rand(500, 10)
    prediction = likelihood(model(test))
print("final", loss.item(), prediction.mean.mean().item(), prediction.variance.mean().item())
