"""GPyTorch: SVGP with 200 inducing points, 5,000 points in batches of 512, 4 epochs, float32."""

import gpytorch
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(gpytorch.models.ApproximateGP):
    def __init__(self, inducing):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(inducing.shape[0])
        strategy = gpytorch.variational.VariationalStrategy(self, inducing, distribution, learn_inducing_locations=True)
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = torch.rand(5000, 4)
y = torch.sin(5.0 * x).sum(-1) + 0.1 * torch.randn(5000)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Model(x[:200])
mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.02)
for _ in range(4):
    for some, of_them in DataLoader(TensorDataset(x, y), batch_size=512, shuffle=True):
        optimizer.zero_grad()
        loss = -mll(model(some), of_them)
        loss.backward()
        optimizer.step()
model.eval()
with torch.no_grad():
    error = (model(x[:1000]).mean - y[:1000]).square().mean()
print("final", loss.item(), error.item())
