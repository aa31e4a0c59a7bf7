"""Classes as users write them, every call of which is counted: kernels, means, likelihoods, a model."""

from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import Mean
from table import count


def _square(kernel, x1, x2, diag):
    one, other = x1 / kernel.lengthscale, x2 / kernel.lengthscale
    gap = one - other if diag else one.unsqueeze(-2) - other.unsqueeze(-3)
    return gap.square().sum(-1)


class FormulaRBF(RBFKernel):
    """The formula on plain distances, which can be differentiated as often as one likes."""

    def forward(self, x1, x2, diag=False, **params):
        return _square(self, x1, x2, diag).div(-2).exp()


class FormulaMatern(MaternKernel):
    """The same of the Matern family."""

    def forward(self, x1, x2, diag=False, **params):
        square = _square(self, x1, x2, diag)
        apart = square > 0
        distance = torch.where(apart, torch.where(apart, square, 1.0).sqrt(), 0.0) * (2 * self.nu) ** 0.5
        grown = {0.5: 1.0, 1.5: 1 + distance, 2.5: 1 + distance + (2 * self.nu) * square / 3}[self.nu]
        return grown * (-distance).exp()


class Own(Kernel):
    """Without a thought of diagonals: the library takes those of the whole matrix."""

    has_lengthscale = True

    def forward(self, x1, x2, **params):
        count("own kernel")
        return (-(x1.unsqueeze(-2) - x2.unsqueeze(-3)).div(self.lengthscale.unsqueeze(-2)).square().sum(-1)).exp()


class WrongDiagonal(Own):
    """Its diagonal is not that of its matrix: whoever reads one must not be given the other."""

    def forward(self, x1, x2, diag=False, **params):
        return torch.full_like(x1[..., 0], 1.5) if diag else super().forward(x1, x2, **params)


class Doubled(RBFKernel):
    """A subclass of a known kernel with a formula of its own."""

    def forward(self, x1, x2, diag=False, **params):
        count("doubled")
        return 2 * super().forward(x1, x2, diag=diag, **params)


class Tasked(RBFKernel):
    """Takes a tensor as a keyword argument, by which the covariance is scaled."""

    def forward(self, x1, x2, diag=False, task=None, **params):
        found = super().forward(x1, x2, diag=diag, **params)
        return found if task is None else found * task.sum()


class Buffered(Kernel):
    """Has buffers that the covariance depends on."""

    has_lengthscale = True

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.register_buffer("shift", torch.tensor(0.5))
        self.register_buffer("height", torch.tensor(1.5))

    def forward(self, x1, x2, diag=False, **params):
        found = self.covar_dist(x1 / self.lengthscale, x2 / self.lengthscale, square_dist=True, diag=diag)
        return (self.height + found * self.shift).reciprocal()


class Hyper(Kernel):
    """The lengthscale of its base kernel comes from a network and is set before each call."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.base_kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
        self.net = torch.nn.Linear(1, 2)
        self.context = torch.ones(1)
        del self.base_kernel.base_kernel.raw_lengthscale

    def forward(self, x1, x2, diag=False, **params):
        self.base_kernel.base_kernel.raw_lengthscale = self.net(self.context.to(self.net.weight)).unsqueeze(0)
        return self.base_kernel.forward(x1, x2, diag=diag, **params)


class Attribute(Kernel):
    """Its lengthscale is a plain tensor, no parameter: hyper-networks set it for each call."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.scale = torch.tensor(0.5)

    def forward(self, x1, x2, diag=False, **params):
        scale = self.scale.to(x1)
        return self.covar_dist(x1 / scale, x2 / scale, square_dist=True, diag=diag).div(-2).exp()


class Deep(Kernel):
    """A kernel of features; with `normed` weights it cannot be deep-copied once it was called."""

    def __init__(self, normed: bool = False, **options: Any):
        super().__init__(**options)
        generator = torch.Generator().manual_seed(5)
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        if normed:
            self.net[0] = torch.nn.utils.weight_norm(self.net[0])
        self.base_kernel = ScaleKernel(RBFKernel(ard_num_dims=2))

    def forward(self, x1, x2, diag=False, **params):
        count("deep kernel")
        same = x1 is x2
        one = self.net(x1)
        return self.base_kernel.forward(one, one if same else self.net(x2), diag=diag, **params)


class OwnMean(Mean):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x):
        count("own mean")
        return (x[..., :2] * self.weight.to(x)).sum(-1).sin()


class Counting(GaussianLikelihood):
    """A foreign likelihood that does no more than count."""

    def marginal(self, function_dist, *params, **kwargs):
        count("likelihood's marginal")
        return super().marginal(function_dist, *params, **kwargs)

    def __call__(self, *args, **kwargs):
        count("likelihood")
        return super().__call__(*args, **kwargs)


class Louder(GaussianLikelihood):
    """A foreign likelihood with more noise than the library's."""

    def _shaped_noise_covar(self, base_shape, *params, **kwargs):
        count("likelihood's noise")
        return super()._shaped_noise_covar(base_shape, *params, **kwargs) * 2.0


class CountingFixed(FixedNoiseGaussianLikelihood):
    def marginal(self, function_dist, *params, **kwargs):
        count("fixed likelihood's marginal")
        return super().marginal(function_dist, *params, **kwargs)


class Regression(gpytorch.models.ExactGP):
    """A model as users write it."""

    def __init__(self, x, y, likelihood, mean, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = mean, kernel

    def forward(self, x):
        count("forward")
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Features(Regression):
    """A deep kernel as the library's examples have it: the network is the model's."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.net = Deep().net

    def forward(self, x):
        return super().forward(self.net(x))
