"""GPyTorch: three outputs as a batch of independent models, 100 points, 60 steps of Adam, float32."""

import gpytorch
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        batch = torch.Size([3])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(batch_shape=batch), batch_shape=batch
        )

    def forward(self, x):
        single = gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        return gpytorch.distributions.MultitaskMultivariateNormal.from_batch_mvn(single)


torch.manual_seed(0)
x = torch.linspace(0, 1, 100)
y = torch.stack([torch.sin(6.283 * x), torch.cos(6.283 * x), x.square()], -1) + 0.2 * torch.randn(100, 3)
likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=3)
model = Model(x, y, likelihood)
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(60):
    optimizer.zero_grad()
    loss = -mll(model(x), y)
    loss.backward()
    optimizer.step()
model.eval()
likelihood.eval()
with torch.no_grad(), gpytorch.settings.fast_pred_var():
    prediction = likelihood(model(torch.linspace(0, 1, 51)))
print("final", loss.item(), prediction.mean.sum().item(), prediction.variance.sum().item())
