"""GPyTorch: a variational model with 50 inducing points, 2,000 points in batches of 200, 100 epochs, float32."""

import gpytorch
import torch


class Model(gpytorch.models.ApproximateGP):
    def __init__(self, inducing):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(inducing.shape[0])
        strategy = gpytorch.variational.VariationalStrategy(self, inducing, distribution, learn_inducing_locations=True)
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=3))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = torch.rand(2000, 3)
y = torch.sin(6 * x).sum(-1) + 0.1 * torch.randn(2000)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Model(x[:50])
mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01)
for epoch in range(100):
    model.train()
    likelihood.train()
    for rows in torch.randperm(len(x)).split(200):
        optimizer.zero_grad()
        loss = -mll(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    if epoch % 20 == 19:
        model.eval()
        with torch.no_grad():
            error = (model(x[:200]).mean - y[:200]).square().mean()
print("final", loss.item(), error.item())
