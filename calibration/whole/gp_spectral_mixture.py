"""GPyTorch: a spectral mixture of four on 100 points, 100 steps of Adam, float32, as in the tutorial."""

import gpytorch
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.SpectralMixtureKernel(num_mixtures=4)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = torch.linspace(0, 1, 100)
y = torch.sin(12.566 * x) + 0.2 * torch.randn(100)
new = torch.linspace(0, 1.5, 80)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Model(x, y, likelihood)
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(100):
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
