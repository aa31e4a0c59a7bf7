"""GPyTorch: a list of two models with their own data, 60 steps of Adam, float32, as in the tutorial."""

import gpytorch
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
first, second = torch.linspace(0, 0.95, 50) + 0.05 * torch.rand(50), torch.linspace(0, 0.95, 25) + 0.05 * torch.rand(25)
sets = [(first, torch.sin(6.283 * first)), (second, torch.cos(6.283 * second))]
models = [Model(x, y + 0.2 * torch.randn_like(y), gpytorch.likelihoods.GaussianLikelihood()) for x, y in sets]
model = gpytorch.models.IndependentModelList(*models)
likelihood = gpytorch.likelihoods.LikelihoodList(*(one.likelihood for one in models))
mll = gpytorch.mlls.SumMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(60):
    optimizer.zero_grad()
    loss = -mll(model(*model.train_inputs), model.train_targets)
    loss.backward()
    optimizer.step()
model.eval()
likelihood.eval()
new = torch.linspace(0, 1, 51)
with torch.no_grad(), gpytorch.settings.fast_pred_var():
    predictions = likelihood(*model(new, new))
print("final", loss.item(), *(prediction.mean.sum().item() for prediction in predictions))
