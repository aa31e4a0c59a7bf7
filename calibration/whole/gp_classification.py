"""GPyTorch: classification by Dirichlet labels, three classes as a batch of exact models, 300 points, 60 steps."""

import gpytorch
import torch
from gpytorch.likelihoods import DirichletClassificationLikelihood


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, classes):
        super().__init__(x, y, likelihood)
        batch = torch.Size([classes])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(batch_shape=batch), batch_shape=batch
        )

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = 4 * torch.rand(300, 2) - 2
labels = (torch.atan2(x[:, 0], x[:, 1]).abs() * 0.95).long()
likelihood = DirichletClassificationLikelihood(labels, learn_additional_noise=True)
model = Model(x, likelihood.transformed_targets, likelihood, likelihood.num_classes)
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(60):
    optimizer.zero_grad()
    loss = -mll(model(x), likelihood.transformed_targets).sum()
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    scores = model(torch.rand(400, 2)).loc
print("final", loss.item(), scores.mean().item())
