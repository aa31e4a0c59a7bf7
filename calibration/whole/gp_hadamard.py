"""GPyTorch: two tasks observed at different points, 100 points in all, 60 steps of Adam, float32."""

import gpytorch
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, inputs, y, likelihood):
        super().__init__(inputs, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.RBFKernel()
        self.task_covar_module = gpytorch.kernels.IndexKernel(num_tasks=2, rank=1)

    def forward(self, x, task):
        covariance = self.covar_module(x).mul(self.task_covar_module(task))
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), covariance)


torch.manual_seed(0)
x = torch.rand(100, 1)
task = torch.arange(100).ge(50).long().unsqueeze(-1)
y = torch.where(task.squeeze(-1) == 0, torch.sin(6.283 * x[:, 0]), torch.cos(6.283 * x[:, 0])) + 0.2 * torch.randn(100)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Model((x, task), y, likelihood)
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(60):
    optimizer.zero_grad()
    loss = -mll(model(x, task), y)
    loss.backward()
    optimizer.step()
model.eval()
likelihood.eval()
with torch.no_grad(), gpytorch.settings.fast_pred_var():
    prediction = likelihood(model(torch.linspace(0, 1, 51).unsqueeze(-1), torch.zeros(51, 1, dtype=torch.long)))
print("final", loss.item(), prediction.mean.sum().item(), prediction.variance.sum().item())
