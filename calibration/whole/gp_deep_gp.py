"""GPyTorch: a deep GP of two layers with 64 inducing points, 600 points in batches of 200, 20 epochs, float32."""

import gpytorch
import torch
from gpytorch.models.deep_gps import DeepGP, DeepGPLayer
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from torch.utils.data import DataLoader, TensorDataset


class Layer(DeepGPLayer):
    def __init__(self, dims, outputs, inducing=64, linear=False):
        batch = torch.Size([]) if outputs is None else torch.Size([outputs])
        points = torch.randn(*batch, inducing, dims)
        distribution = CholeskyVariationalDistribution(inducing, batch_shape=batch)
        super().__init__(VariationalStrategy(self, points, distribution, learn_inducing_locations=True), dims, outputs)
        self.mean_module = gpytorch.means.LinearMean(dims) if linear else gpytorch.means.ConstantMean(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(batch_shape=batch, ard_num_dims=dims), batch_shape=batch
        )

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Model(DeepGP):
    def __init__(self, dims):
        super().__init__()
        self.hidden, self.last = Layer(dims, 2, linear=True), Layer(2, None)
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

    def forward(self, x):
        return self.last(self.hidden(x))


torch.manual_seed(0)
x = torch.rand(600, 5)
y = torch.sin(6 * x[:, 0]) * x[:, 1] + 0.1 * torch.randn(600)
model = Model(5)
mll = gpytorch.mlls.DeepApproximateMLL(gpytorch.mlls.VariationalELBO(model.likelihood, model, num_data=600))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
with gpytorch.settings.num_likelihood_samples(8):
    for _ in range(20):
        for some, of_them in DataLoader(TensorDataset(x, y), batch_size=200, shuffle=True):
            optimizer.zero_grad()
            loss = -mll(model(some), of_them)
            loss.backward()
            optimizer.step()
print("final", loss.item())
