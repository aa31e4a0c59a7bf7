"""A model that several tests of iterated solutions share."""

import gpytorch
from gpytorch.kernels import MaternKernel, ScaleKernel


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), ScaleKernel(MaternKernel(1.5))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
