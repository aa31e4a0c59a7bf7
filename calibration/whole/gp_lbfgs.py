"""GPyTorch: a Matérn kernel on 300 points, fitted by torch's L-BFGS, several starts."""

import gpytorch
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5, ard_num_dims=3))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = torch.rand(300, 3, dtype=torch.float64)
y = torch.sin(5.0 * x).prod(-1) + 0.05 * torch.randn(300, dtype=torch.float64)
found = []
for start in (0.2, 0.5, 1.0):
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Model(x, y, likelihood).double()
    model.covar_module.base_kernel.lengthscale = start
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=40, line_search_fn="strong_wolfe")

    def closure(model=model, mll=mll, optimizer=optimizer):
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    found.append(closure().item())
print("final", min(found))
