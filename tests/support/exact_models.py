"""Exact models that the tests of predictions and fantasies share, how they are read, and how they change."""

import contextlib
import copy

import gpytorch
import torch
from gpytorch import kernels
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, MultitaskMean
from support.models import ExactModel
from support.outcomes import assert_close, judged

import autokern

NONE, BATCH = torch.Size(), torch.Size([2])
N = 40


class Regression(ExactModel):
    def __init__(self, x, y, kernel=None, likelihood=None, batch=NONE):
        kernel = kernel or ScaleKernel(RBFKernel(ard_num_dims=x.shape[-1]))
        noisy = likelihood or GaussianLikelihood(batch_shape=batch)
        super().__init__(x, y, kernel, noisy, ConstantMean(batch_shape=batch))
        if likelihood is None:
            self.likelihood.noise = torch.full((*batch, 1), 0.05)
        self.to(x).eval()


class Formed(Regression):
    """A model that puts its covariance together itself, by a function of its kernel and the points."""

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.form(self.covar_module, x))


def points(*shape, seed=0, dtype=torch.float64):
    return torch.rand(*shape, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def values(x):
    return (4 * x[..., 0]).sin() + x[..., 1]


def regression(n=N, kernel=None, likelihood=None, dtype=torch.float64, form=None):
    x = points(n, dtype=dtype)
    model = (Formed if form else Regression)(x, values(x), kernel, likelihood)
    model.form = form
    return model


def batched(n=25):
    kernel = ScaleKernel(RBFKernel(ard_num_dims=3, batch_shape=BATCH), batch_shape=BATCH)
    kernel.outputscale = torch.tensor([0.5, 2.0])
    return Regression(points(2, n), values(points(2, n)), kernel, batch=BATCH)


class Mine(kernels.Kernel):
    """A kernel as people write them, without a thought of diagonals; the library takes those of the whole matrix."""

    has_lengthscale = True

    def forward(self, x1, x2, **params):
        return (-(x1.unsqueeze(-2) - x2.unsqueeze(-3)).div(self.lengthscale).square().sum(-1)).exp()


def fixed_noise(**options):
    return FixedNoiseGaussianLikelihood(0.05 + torch.arange(N).double() / 80, **options)


MODELS = {
    "ard": regression,
    "matern 5/2": lambda: regression(kernel=ScaleKernel(kernels.MaternKernel(2.5, ard_num_dims=3))),
    "periodic": lambda: regression(kernel=ScaleKernel(PeriodicKernel())),
    "rq": lambda: regression(kernel=ScaleKernel(kernels.RQKernel())),
    "sum": lambda: regression(
        kernel=ScaleKernel(RBFKernel(active_dims=(0,))) + kernels.MaternKernel(1.5) + kernels.ConstantKernel()
    ),
    "product": lambda: regression(kernel=ScaleKernel(RBFKernel() * PeriodicKernel(active_dims=(1,)))),
    "spectral": lambda: regression(kernel=kernels.SpectralMixtureKernel(num_mixtures=2, ard_num_dims=3)),
    "linear": lambda: regression(kernel=kernels.LinearKernel() + RBFKernel()),
    "fixed noise": lambda: regression(likelihood=fixed_noise()),
    "batch": batched,
    "float32": lambda: regression(dtype=torch.float32),
    "mine": lambda: regression(kernel=ScaleKernel(Mine())),
}


class Several(gpytorch.models.ExactGP):
    """Two tasks: one Kronecker product, a batch of independent ones, or one of them at each point (Hadamard)."""

    def __init__(self, kind, n=30):
        (x, *task), each, batch = several_at(kind, n, 0), kind == "hadamard", BATCH if kind == "independent" else NONE
        y = values(x) + tasks(n)[:, 0] if each else torch.stack((values(x), -values(x)), dim=-1)
        super().__init__((x, *task), y, GaussianLikelihood() if each else MultitaskGaussianLikelihood(num_tasks=2))
        torch.manual_seed(0)
        self.kind, self.covar_module = kind, RBFKernel(batch_shape=batch)
        self.mean_module, self.tasks = ConstantMean(batch_shape=batch), kernels.IndexKernel(num_tasks=2, rank=1)
        if kind == "kronecker":
            self.mean_module = MultitaskMean(ConstantMean(), num_tasks=2)
            self.covar_module = kernels.MultitaskKernel(RBFKernel(), num_tasks=2, rank=1)
        self.to(x).eval()

    def forward(self, x, task=None):
        mean, covariance = self.mean_module(x), self.covar_module(x)
        if self.kind == "hadamard":
            return MultivariateNormal(mean, covariance.mul(self.tasks(task)))
        if self.kind == "independent":
            return MultitaskMultivariateNormal.from_batch_mvn(MultivariateNormal(mean, covariance))
        return MultitaskMultivariateNormal(mean, covariance)


KINDS = ["kronecker", "independent", "hadamard"]


def tasks(m):
    return (torch.arange(m) % 2).unsqueeze(-1)


def several_at(kind, m, seed=5):
    return (points(m, seed=seed), tasks(m)) if kind == "hadamard" else (points(m, seed=seed),)


@contextlib.contextmanager
def ours(candidate=None, op="predict"):
    """With autokern; a candidate serves small predictions too, which `posterior` would take, and "arrays" is its."""
    force = candidate and {op: candidate, "posterior": "stock"}
    if candidate == "arrays":
        force = {"posterior": "arrays"}
    with autokern.enabled(), autokern.using(force=force):
        yield


def assert_stock(read, candidate=None, op="predict", **tolerance):
    expected = read()
    with ours(candidate, op):
        assert_close(read(), expected, **tolerance)


def stock_s(**tolerance):
    """Let a test return the same without and with autokern, which its parameter `candidate` serves if it has one."""
    return judged(lambda read, given: assert_stock(read, given.get("candidate"), **tolerance))


def at(model, m, seed=5):
    return points(m, seed=seed, dtype=model.train_targets.dtype)


def moments(posterior):
    found = {"shapes": (*posterior.lazy_covariance_matrix.shape, *posterior.batch_shape)}
    found |= {"mean": posterior.mean, "variance": posterior.variance, "stddev": posterior.stddev}
    return found | {"covariance": posterior.covariance_matrix, "again": posterior.variance}


def truth(model, x):
    """Mean and covariance in float64 by dense algebra."""
    model = copy.deepcopy(model).double()
    with torch.no_grad(), gpytorch.settings.prior_mode():
        z = model.train_inputs[0]
        k = model.likelihood(model(z)).covariance_matrix
        rows = model.covar_module(x.double(), z).to_dense()
        solution = torch.linalg.solve(k, rows.mT).mT
        mean = model.mean_module(x.double()) + solution @ (model.train_targets - model.mean_module(z))
        return mean, model.covar_module(x.double()).to_dense() - solution @ rows.mT


def change(model, by=0.7):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def predicted(model):
    model(at(model, 6))
    return model


def refitted(model):
    """A model of the same data that has predicted nothing."""
    twin = copy.deepcopy(model)
    twin.train_inputs, twin.train_targets, twin.prediction_strategy = model.train_inputs, model.train_targets, None
    return twin


def fantasy(model, new, targets=None, **options):
    """The model after observations that are imagined."""
    new = new.to(model.train_targets)
    return model.get_fantasy_model(new, values(new) if targets is None else targets.to(new), **options)
