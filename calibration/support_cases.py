"""Models of the support matrix: each a training step and a prediction at a small size, as a user writes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gpytorch
import torch
from gpytorch import kernels as k
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood

N, NEW = 80, 7
"""Training and test points of each case."""

Step = Callable[[], object]


class Made(NamedTuple):
    """A training step and a prediction, and of models of GPyTorch what they are made of."""

    train: Step
    predict: Step
    mll: Any = None
    inputs: tuple[torch.Tensor, ...] = ()
    targets: Any = None
    new: tuple[torch.Tensor, ...] = ()


class Case(NamedTuple):
    """A row of the matrix."""

    group: str
    name: str
    make: Callable[[], Made]


def points(n: int, d: int) -> torch.Tensor:
    return torch.rand(n, d, dtype=torch.float64)


def targets(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(4 * x).sum(-1) + 0.1 * torch.randn(x.shape[0], dtype=x.dtype)


class Exact(gpytorch.models.ExactGP):
    """An exact model with a constant mean; `features` are those of a deep kernel."""

    def __init__(self, inputs, y, likelihood, kernel, features=None):
        super().__init__(inputs, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=kernel.batch_shape)
        self.covar_module = kernel
        self.features = features

    def forward(self, x):
        if self.features is not None:
            x = self.features(x)
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def read(prediction: MultivariateNormal) -> tuple[torch.Tensor, torch.Tensor]:
    return prediction.mean, prediction.variance


def steps(model, likelihood, y, inputs, new, mll=None) -> Made:
    """Return a step of a loop of GPyTorch and a prediction with noise."""
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model) if mll is None else mll

    def train():
        model.train()
        likelihood.train()
        model.zero_grad()
        (-mll(model(*inputs), y).sum()).backward()

    def predict():
        model.eval()
        likelihood.eval()
        with torch.no_grad():
            read(model(*new))

    return Made(train, predict, mll, inputs, y, new)


def exact(kernel, d=3, likelihood=None, features=None, mll=None) -> Made:
    x = points(N, d)
    likelihood = GaussianLikelihood() if likelihood is None else likelihood
    model = Exact(x, targets(x), likelihood, kernel, features).double()
    return steps(model, likelihood, targets(x), (x,), (points(NEW, d),), mll and mll(likelihood, model))


class SlowerDecay(k.RBFKernel):
    """A user's subclass with a forward method of its own."""

    has_lengthscale = True

    def forward(self, x1, x2, diag=False, **params):
        return self.covar_dist(x1 / self.lengthscale, x2 / self.lengthscale, diag=diag, square_dist=False).neg().exp()


class Subclass(k.RBFKernel):
    """A user's subclass that changes nothing."""


class OwnKernel(k.Kernel):
    """A user's kernel."""

    has_lengthscale = True

    def forward(self, x1, x2, diag=False, **params):
        return self.covar_dist(x1 / self.lengthscale, x2 / self.lengthscale, diag=diag, square_dist=True).add(1).pow(-1)


def additive() -> k.Kernel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return k.AdditiveStructureKernel(k.ScaleKernel(k.RBFKernel()), num_dims=3)


KERNELS: dict[str, Callable[[], Made]] = {
    "RBF": lambda: exact(k.ScaleKernel(k.RBFKernel())),
    "RBF, ARD": lambda: exact(k.ScaleKernel(k.RBFKernel(ard_num_dims=3))),
    "Matérn 1/2": lambda: exact(k.ScaleKernel(k.MaternKernel(nu=0.5))),
    "Matérn 3/2": lambda: exact(k.ScaleKernel(k.MaternKernel(nu=1.5))),
    "Matérn 5/2, ARD": lambda: exact(k.ScaleKernel(k.MaternKernel(nu=2.5, ard_num_dims=3))),
    "Matérn 3/2 in one dimension": lambda: exact(k.ScaleKernel(k.MaternKernel(nu=1.5)), d=1),
    "periodic": lambda: exact(k.ScaleKernel(k.PeriodicKernel())),
    "cosine": lambda: exact(k.ScaleKernel(k.CosineKernel()), d=1),
    "rational quadratic": lambda: exact(k.ScaleKernel(k.RQKernel())),
    "linear": lambda: exact(k.LinearKernel()),
    "polynomial, degree 2": lambda: exact(k.ScaleKernel(k.PolynomialKernel(power=2))),
    "piecewise polynomial": lambda: exact(k.ScaleKernel(k.PiecewisePolynomialKernel(q=2))),
    "RBF + linear": lambda: exact(k.ScaleKernel(k.RBFKernel()) + k.LinearKernel()),
    "RBF + Matérn 5/2": lambda: exact(k.ScaleKernel(k.RBFKernel()) + k.ScaleKernel(k.MaternKernel())),
    "RBF × periodic": lambda: exact(k.ScaleKernel(k.RBFKernel() * k.PeriodicKernel())),
    "active dimensions": lambda: exact(
        k.ScaleKernel(k.RBFKernel(active_dims=(0,))) + k.ScaleKernel(k.MaternKernel(active_dims=(1, 2)))
    ),
    "additive structure": lambda: exact(additive()),
    "spectral mixture": lambda: exact(k.SpectralMixtureKernel(num_mixtures=3), d=1),
    "a subclass of RBFKernel that changes nothing": lambda: exact(k.ScaleKernel(Subclass())),
    "a subclass of RBFKernel with its own forward": lambda: exact(k.ScaleKernel(SlowerDecay())),
    "a user's kernel": lambda: exact(k.ScaleKernel(OwnKernel())),
}


def fixed_noise() -> Made:
    noise = torch.full((N,), 0.01, dtype=torch.float64)
    return exact(k.ScaleKernel(k.RBFKernel()), likelihood=gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise))


def deep() -> Made:
    features = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return exact(k.ScaleKernel(k.RBFKernel(ard_num_dims=2)), features=features)


def batch() -> Made:
    shape, x = torch.Size([2]), points(N, 3)
    kernel = k.ScaleKernel(k.RBFKernel(batch_shape=shape), batch_shape=shape)
    likelihood = GaussianLikelihood(batch_shape=shape)
    x, y = x.expand(2, N, 3), torch.stack((targets(x), targets(x)))
    model = Exact(x, y, likelihood, kernel).double()
    return steps(model, likelihood, y, (x,), (points(NEW, 3).expand(2, NEW, 3),))


class Multitask(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=2)
        self.covar_module = k.MultitaskKernel(k.RBFKernel(), num_tasks=2, rank=1)

    def forward(self, x):
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


def kronecker() -> Made:
    x = points(N, 1)
    y = torch.stack((targets(x), targets(x)), -1)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
    model = Multitask(x, y, likelihood).double()
    return steps(model, likelihood, y, (x,), (points(NEW, 1),))


class Hadamard(gpytorch.models.ExactGP):
    def __init__(self, inputs, y, likelihood):
        super().__init__(inputs, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = k.RBFKernel()
        self.task_covar_module = k.IndexKernel(num_tasks=2, rank=1)

    def forward(self, x, task):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x).mul(self.task_covar_module(task)))


def hadamard() -> Made:
    x, task = points(N, 1), torch.arange(N).remainder(2).unsqueeze(-1)
    likelihood = GaussianLikelihood()
    model = Hadamard((x, task), targets(x), likelihood).double()
    new = (points(NEW, 1), torch.zeros(NEW, 1, dtype=torch.long))
    return steps(model, likelihood, targets(x), (x, task), new)


class Gradients(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMeanGrad()
        self.covar_module = k.ScaleKernel(k.RBFKernelGrad(ard_num_dims=2))

    def forward(self, x):
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


def derivatives() -> Made:
    x = points(N // 2, 2)
    y = torch.cat((targets(x).unsqueeze(-1), 4 * torch.cos(4 * x)), -1)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=3)
    return steps(Gradients(x, y, likelihood).double(), likelihood, y, (x,), (points(NEW, 2),))


def sgpr() -> Made:
    base, likelihood = k.ScaleKernel(k.RBFKernel()), GaussianLikelihood()
    return exact(k.InducingPointKernel(base, points(8, 3), likelihood), likelihood=likelihood)


def ski() -> Made:
    return exact(k.GridInterpolationKernel(k.ScaleKernel(k.RBFKernel()), grid_size=32, num_dims=1), d=1)


class Variational(gpytorch.models.ApproximateGP):
    def __init__(self, inducing):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(inducing.shape[0])
        strategy = gpytorch.variational.VariationalStrategy(self, inducing, distribution)
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = k.ScaleKernel(k.RBFKernel())

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def variational(likelihood, sign: bool = False) -> Made:
    x = points(N, 3)
    y = targets(x).sign().clamp(min=0) if sign else targets(x)
    model = Variational(points(8, 3)).double()
    mll = gpytorch.mlls.VariationalELBO(likelihood.double(), model, num_data=N)
    return steps(model, likelihood, y, (x,), (points(NEW, 3),), mll)


MODELS: dict[str, Callable[[], Made]] = {
    "ExactGP, GaussianLikelihood": lambda: exact(k.ScaleKernel(k.RBFKernel())),
    "ExactGP, FixedNoiseGaussianLikelihood": fixed_noise,
    "ExactGP, LeaveOneOutPseudoLikelihood": lambda: exact(
        k.ScaleKernel(k.RBFKernel()), mll=gpytorch.mlls.LeaveOneOutPseudoLikelihood
    ),
    "ExactGP, a batch of two": batch,
    "ExactGP, a deep kernel": deep,
    "multitask, Kronecker": kronecker,
    "multitask, Hadamard": hadamard,
    "with derivatives (RBFKernelGrad)": derivatives,
    "SGPR (InducingPointKernel)": sgpr,
    "SKI/KISS (GridInterpolationKernel)": ski,
    "SVGP, GaussianLikelihood": lambda: variational(GaussianLikelihood()),
    "SVGP, BernoulliLikelihood": lambda: variational(gpytorch.likelihoods.BernoulliLikelihood(), sign=True),
    "SVGP, StudentTLikelihood": lambda: variational(gpytorch.likelihoods.StudentTLikelihood()),
}


def fitted(model, mll=gpytorch.mlls.ExactMarginalLogLikelihood, new=None) -> Made:
    from botorch.fit import fit_gpytorch_mll

    fresh = points(NEW, model.train_inputs[0].shape[-1]) if new is None else new

    def fit():
        with warnings.catch_warnings():  # two iterations do not converge
            warnings.simplefilter("ignore")
            kept = {"max_attempts": 1, "pick_best_of_all_attempts": True}
            fit_gpytorch_mll(mll(model.likelihood, model), optimizer_kwargs={"options": {"maxiter": 2}}, **kept)

    def posterior():
        given = fresh.clone().requires_grad_()
        found = model.posterior(given)
        (found.mean.sum() + found.variance.sum()).backward()

    return Made(fit, posterior)


def single(**options) -> Made:
    from botorch.models import SingleTaskGP

    x = points(N, 3)
    return fitted(SingleTaskGP(x, targets(x).unsqueeze(-1), **options))


def two_outputs() -> Made:
    from botorch.models import SingleTaskGP

    x = points(N, 3)
    return fitted(SingleTaskGP(x, torch.stack((targets(x), targets(x)), -1)))


def mixed() -> Made:
    from botorch.models import MixedSingleTaskGP

    x = torch.cat((points(N, 2), torch.arange(N).remainder(3).double().unsqueeze(-1)), -1)
    return fitted(MixedSingleTaskGP(x, targets(x).unsqueeze(-1), cat_dims=[2]), new=x[:NEW])


def fidelities(**options) -> Made:
    from botorch.models import SingleTaskMultiFidelityGP

    x = points(N, 3)
    return fitted(SingleTaskMultiFidelityGP(x, targets(x).unsqueeze(-1), data_fidelities=[2], **options))


def multi_task() -> Made:
    from botorch.models import MultiTaskGP

    x = torch.cat((points(N, 2), torch.arange(N).remainder(2).double().unsqueeze(-1)), -1)
    return fitted(MultiTaskGP(x, targets(x).unsqueeze(-1), task_feature=-1), new=points(NEW, 2))


def kronecker_multi_task() -> Made:
    from botorch.models import KroneckerMultiTaskGP

    x = points(N, 2)
    return fitted(KroneckerMultiTaskGP(x, torch.stack((targets(x), targets(x)), -1)))


def tensor_outputs() -> Made:
    from botorch.models import HigherOrderGP

    x = points(12, 2)
    return fitted(HigherOrderGP(x, targets(x)[:, None, None] * torch.rand(4, 3, dtype=x.dtype)))


def model_list() -> Made:
    from botorch.models import ModelListGP, SingleTaskGP

    x = points(N, 3)
    model = ModelListGP(*(SingleTaskGP(x, targets(x).unsqueeze(-1)) for _ in range(2)))
    return fitted(model, gpytorch.mlls.SumMarginalLogLikelihood, points(NEW, 3))


def saas() -> Made:
    from botorch.models.map_saas import AdditiveMapSaasSingleTaskGP

    x = points(12, 3)
    return fitted(AdditiveMapSaasSingleTaskGP(x, targets(x).unsqueeze(-1), num_taus=2))


BOTORCH: dict[str, Callable[[], Made]] = {
    "SingleTaskGP": single,
    "SingleTaskGP, observed noise": lambda: single(train_Yvar=torch.full((N, 1), 0.01, dtype=torch.float64)),
    "SingleTaskGP, its former Matérn kernel with priors": lambda: single(
        covar_module=k.ScaleKernel(
            k.MaternKernel(ard_num_dims=3, lengthscale_prior=gpytorch.priors.GammaPrior(3.0, 6.0)),
            outputscale_prior=gpytorch.priors.GammaPrior(2.0, 0.15),
        )
    ),
    "SingleTaskGP, a user's kernel": lambda: single(covar_module=k.ScaleKernel(OwnKernel())),
    "SingleTaskGP, two outputs": two_outputs,
    "MixedSingleTaskGP": mixed,
    "SingleTaskMultiFidelityGP": fidelities,
    "SingleTaskMultiFidelityGP, not linear-truncated": lambda: fidelities(iteration_fidelity=1, linear_truncated=False),
    "MultiTaskGP": multi_task,
    "KroneckerMultiTaskGP": kronecker_multi_task,
    "HigherOrderGP": tensor_outputs,
    "ModelListGP": model_list,
    "AdditiveMapSaasSingleTaskGP": saas,
}


def cases() -> Iterator[Case]:
    for group, rows in (("kernels", KERNELS), ("models", MODELS), ("botorch", BOTORCH)):
        yield from (Case(group, name, make) for name, make in rows.items())
