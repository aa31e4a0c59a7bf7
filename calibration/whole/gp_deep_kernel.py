"""GPyTorch: a network of two layers before an RBF kernel, 400 points, 60 steps of Adam, float32."""

import gpytorch
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))
        layers = [torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)]
        self.feature_extractor = torch.nn.Sequential(*layers)
        self.scale_to_bounds = gpytorch.utils.grid.ScaleToBounds(-1.0, 1.0)

    def forward(self, x):
        features = self.scale_to_bounds(self.feature_extractor(x))
        return gpytorch.distributions.MultivariateNormal(self.mean_module(features), self.covar_module(features))


torch.manual_seed(0)
x = torch.rand(400, 8)
y = torch.sin(3.0 * x.sum(-1)) + 0.1 * torch.randn(400)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Model(x, y, likelihood)
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(60):
    optimizer.zero_grad()
    loss = -mll(model(x), y)
    loss.backward()
    optimizer.step()
model.eval()
likelihood.eval()
with torch.no_grad(), gpytorch.settings.fast_pred_var():
    prediction = likelihood(model(torch.rand(100, 8)))
print("final", loss.item(), prediction.variance.mean().item())
