"""GPyTorch: 150 fantasy updates of a model of 150 points, a prediction after each."""

import gpytorch
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = torch.rand(300, 2, dtype=torch.float64)
y = torch.sin(6.0 * x).sum(-1) + 0.1 * torch.randn(300, dtype=torch.float64)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Model(x[:150], y[:150], likelihood).double()
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(40):
    optimizer.zero_grad()
    loss = -mll(model(x[:150]), y[:150])
    loss.backward()
    optimizer.step()
model.eval()
likelihood.eval()
error = torch.zeros((), dtype=torch.float64)
with torch.no_grad(), gpytorch.settings.fast_pred_var():
    for i in range(150, 300):
        prediction = likelihood(model(x[i : i + 1]))
        error += (prediction.mean - y[i]).square().sum() / prediction.variance.sum()
        model = model.get_fantasy_model(x[i : i + 1], y[i : i + 1])
print("final", loss.item(), error.item())
