"""GPyTorch: values and derivatives of a function of one variable at 20 points, 60 steps of Adam, float32."""

import gpytorch
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMeanGrad()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernelGrad())

    def forward(self, x):
        return gpytorch.distributions.MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = torch.linspace(0.0, 5.0, 20).unsqueeze(-1)
y = torch.cat([torch.sin(2.0 * x) + torch.cos(x), 2.0 * torch.cos(2.0 * x) - torch.sin(x)], -1)
y = y + 0.05 * torch.randn(20, 2)
likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
model = Model(x, y, likelihood)
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for _ in range(60):
    optimizer.zero_grad()
    loss = -mll(model(x), y)
    loss.backward()
    optimizer.step()
model.eval()
likelihood.eval()
with torch.no_grad():
    prediction = likelihood(model(torch.linspace(0.0, 5.0, 60).unsqueeze(-1)))
print("final", loss.item(), prediction.mean.sum().item())
