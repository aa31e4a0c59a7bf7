"""GPyTorch: a kernel of the user's own, a warped RBF, on 60 points, 1,000 steps of Adam, float64."""

import gpytorch
import torch


class Warped(gpytorch.kernels.Kernel):
    has_lengthscale = True

    def __init__(self):
        super().__init__()
        self.register_parameter("raw_bend", torch.nn.Parameter(torch.zeros(1)))

    def forward(self, x1, x2, diag=False, **params):
        bend = torch.nn.functional.softplus(self.raw_bend)
        one, two = (torch.asinh(bend * x) / bend / self.lengthscale for x in (x1, x2))
        return torch.exp(-0.5 * self.covar_dist(one, two, diag=diag, square_dist=True))


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(Warped())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = 4 * torch.rand(60, 2, dtype=torch.float64)
y = torch.sin(x.square().sum(-1) / 4) + 0.1 * torch.randn(60, dtype=torch.float64)
likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
model = Model(x, y, likelihood).double()
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(1000):
    optimizer.zero_grad()
    loss = -mll(model(x), y)
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    prediction = likelihood(model(4 * torch.rand(100, 2, dtype=torch.float64)))
print("final", loss.item(), prediction.mean.sum().item(), prediction.variance.mean().item())
