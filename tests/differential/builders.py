"""Kernels, likelihoods, means, data and models by name. All is rounded to float32 first, so that truths share it."""

from collections.abc import Callable
from typing import Any

import torch
import user_code
from gpytorch import kernels as k
from gpytorch import likelihoods, means
from gpytorch.constraints import Interval
from table import FORMULAE, See

NONE = torch.Size()


def _mixture(b: torch.Size) -> Any:
    made = k.SpectralMixtureKernel(num_mixtures=3, ard_num_dims=2, batch_shape=b)
    made.mixture_means = torch.tensor([[[0.2, 0.9]], [[0.5, 0.1]], [[1.0, 0.4]]])
    made.mixture_scales = torch.tensor([[[0.4, 0.3]], [[0.2, 0.6]], [[0.5, 0.5]]])
    return made


def _rff(b: torch.Size) -> Any:
    made = k.RFFKernel(num_samples=20, num_dims=2, batch_shape=b)
    made.randn_weights.copy_(torch.randn(made.randn_weights.shape, generator=torch.Generator().manual_seed(3)))
    return made


def _matern(nu: float, **options: Any) -> Any:
    return (user_code.FormulaMatern if FORMULAE["on"] else k.MaternKernel)(nu, **options)


def _rbf(**options: Any) -> Any:
    return (user_code.FormulaRBF if FORMULAE["on"] else k.RBFKernel)(**options)


def _ard(b: torch.Size, **more: Any) -> Any:
    made = _rbf(ard_num_dims=2, batch_shape=b, **more)
    made.lengthscale = torch.tensor([0.4, 0.7])
    return made


def _kiss(b: torch.Size) -> Any:
    return k.GridInterpolationKernel(_rbf(), grid_size=12, num_dims=2, grid_bounds=[(-0.2, 1.2)] * 2)


def _inducing(b: torch.Size) -> Any:
    places = torch.rand(6, 2, generator=torch.Generator().manual_seed(9))
    return k.InducingPointKernel(k.ScaleKernel(_rbf()), places, likelihoods.GaussianLikelihood())


KERNELS: dict[str, Callable[[torch.Size], Any]] = {
    "rbf": lambda b: _rbf(batch_shape=b),
    "rbf ard": _ard,
    "matern12": lambda b: _matern(0.5, batch_shape=b),
    "matern32": lambda b: _matern(1.5, ard_num_dims=2, batch_shape=b),
    "matern52": lambda b: _matern(2.5, batch_shape=b),
    "scaled rbf": lambda b: k.ScaleKernel(_ard(b), batch_shape=b),
    "scaled matern12": lambda b: k.ScaleKernel(_matern(0.5, ard_num_dims=2, batch_shape=b), batch_shape=b),
    "scaled matern32": lambda b: k.ScaleKernel(_matern(1.5, batch_shape=b), batch_shape=b),
    "scaled matern52": lambda b: k.ScaleKernel(_matern(2.5, ard_num_dims=2, batch_shape=b), batch_shape=b),
    "twice scaled": lambda b: k.ScaleKernel(k.ScaleKernel(_ard(b), batch_shape=b), batch_shape=b),
    "active matern52": lambda b: k.ScaleKernel(
        _matern(2.5, active_dims=(0,), lengthscale_constraint=Interval(0.1, 3.0), batch_shape=b), batch_shape=b
    ),
    "active dimension": lambda b: k.ScaleKernel(_rbf(active_dims=(1,), batch_shape=b), batch_shape=b),
    "periodic": lambda b: k.ScaleKernel(k.PeriodicKernel(batch_shape=b), batch_shape=b),
    "rq": lambda b: k.ScaleKernel(k.RQKernel(batch_shape=b), batch_shape=b),
    "cosine": lambda b: k.ScaleKernel(k.CosineKernel(batch_shape=b), batch_shape=b),
    "linear": lambda b: k.LinearKernel(batch_shape=b),
    "polynomial": lambda b: k.PolynomialKernel(2, batch_shape=b),
    "piecewise": lambda b: k.ScaleKernel(k.PiecewisePolynomialKernel(q=2, batch_shape=b), batch_shape=b),
    "rbf + matern": lambda b: k.ScaleKernel(_ard(b), batch_shape=b) + _matern(1.5, batch_shape=b),
    "rbf + linear": lambda b: k.ScaleKernel(_ard(b), batch_shape=b) + k.LinearKernel(batch_shape=b),
    "rbf + constant": lambda b: k.ScaleKernel(_ard(b), batch_shape=b) + k.ConstantKernel(batch_shape=b),
    "periodic * rbf": lambda b: k.ScaleKernel(k.PeriodicKernel(batch_shape=b) * _ard(b), batch_shape=b),
    "by dimension": lambda b: k.ScaleKernel(
        _rbf(active_dims=(0,), batch_shape=b) * _matern(2.5, active_dims=(1,), batch_shape=b), batch_shape=b
    ),
    "mixture": _mixture,
    "kiss": _kiss,
    "scaled kiss": lambda b: k.ScaleKernel(_kiss(b)),
    "rff": _rff,
    "inducing": _inducing,
    "own": lambda b: k.ScaleKernel(user_code.Own(batch_shape=b), batch_shape=b),
    "wrong diagonal": lambda b: k.ScaleKernel(user_code.WrongDiagonal(batch_shape=b), batch_shape=b),
    "doubled": lambda b: k.ScaleKernel(user_code.Doubled(batch_shape=b), batch_shape=b),
    "own + rbf": lambda b: user_code.Own(batch_shape=b) + k.ScaleKernel(_ard(b), batch_shape=b),
    "buffered": lambda b: k.ScaleKernel(user_code.Buffered()),
    "deep": lambda b: user_code.Deep(),
    "weight-normed": lambda b: user_code.Deep(normed=True),
    "hyper": lambda b: user_code.Hyper(),
    "attribute": lambda b: k.ScaleKernel(user_code.Attribute()),
    "scaled constant": lambda b: k.ScaleKernel(k.ConstantKernel(batch_shape=b), batch_shape=b),
}
GRAPHLESS = "stock's functions keep no graph of their first derivative by the lengthscale: the formula's are right"
ROUNDED = "stock's distances are rounded before their root is taken, on the diagonal too: the formula's are exact"
NO_SECOND = "torch has no second derivatives of distances of fewer than 26 points, of other formulae there are some"
PLAIN = ["scaled rbf", "scaled matern12", "scaled matern32", "scaled matern52"]
"""What autokern has formulae for."""
SUMS = ["periodic", "rq", "rbf + matern", "rbf + constant", "periodic * rbf", "by dimension"]
FOREIGN = ["own", "wrong diagonal", "doubled", "deep", "weight-normed", "hyper", "buffered", "mixture"]
STRUCTURED = ["rbf + linear", "linear", "scaled kiss"]

MEANS: dict[str, Callable[[torch.Size], Any]] = {
    "zero": lambda b: means.ZeroMean(batch_shape=b),
    "constant": lambda b: means.ConstantMean(batch_shape=b),
    "linear mean": lambda b: means.LinearMean(2, batch_shape=b),
    "own mean": lambda b: user_code.OwnMean(),
}


def noises(n: int, b: torch.Size = NONE) -> torch.Tensor:
    return (0.05 + torch.arange(n) / (4 * max(n, 1))).expand(*b, n).contiguous()


def _gaussian(kind: Any) -> Callable[[int, torch.Size], Any]:
    def make(n: int, b: torch.Size) -> Any:
        made = kind(batch_shape=b)
        made.noise = 0.1
        return made

    return make


LIKELIHOODS: dict[str, Callable[[int, torch.Size], Any]] = {
    "gaussian": _gaussian(likelihoods.GaussianLikelihood),
    "fixed": lambda n, b: likelihoods.FixedNoiseGaussianLikelihood(noises(n, b)),
    "fixed and learned": lambda n, b: likelihoods.FixedNoiseGaussianLikelihood(
        noises(n, b), learn_additional_noise=True, batch_shape=b
    ),
    "missing": _gaussian(likelihoods.GaussianLikelihoodWithMissingObs),
    "counting": _gaussian(user_code.Counting),
    "louder": _gaussian(user_code.Louder),
    "counting fixed": lambda n, b: user_code.CountingFixed(noises(n, b)),
}


def points(see: See, *shape: int, seed: int = 0, d: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, d, generator=generator, dtype=torch.float32).to(see.dtype)


def values(x: torch.Tensor) -> torch.Tensor:
    x64 = x.double()
    return ((4 * x64[..., 0]).sin() + x64[..., -1]).float().to(x.dtype)


def normals(see: See, *shape: int, seed: int = 4) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(see.dtype)


def regression(
    see, n=30, kernel="scaled rbf", likelihood="gaussian", mean="constant", batch=(), x=None, y=None, kind=None
):
    """An exact model in the dtype of the run; parts by name or as they are."""
    b = torch.Size(batch)
    x = points(see, *b, n) if x is None else x
    n = x.shape[-2]
    likelihood = LIKELIHOODS[likelihood](n, b) if isinstance(likelihood, str) else likelihood
    mean = MEANS[mean](b) if isinstance(mean, str) else mean
    kind = kind or (user_code.Features if kernel == "features" else user_code.Regression)
    kernel = KERNELS["scaled rbf" if kernel == "features" else kernel](b) if isinstance(kernel, str) else kernel
    if isinstance(kernel, k.InducingPointKernel):
        kernel.likelihood = likelihood
    return kind(x, values(x) if y is None else y, likelihood, mean, kernel).float().to(see.dtype)
