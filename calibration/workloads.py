"""The models and data behind `end_to_end.py`: exact training, a stream of fantasy updates, conjugate gradients.

Everything here is plain GPyTorch and linear_operator, as a user would write it; nothing imports autokern.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import gpytorch
import linear_operator
import torch
from linear_operator.operators import DenseLinearOperator
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

SURFACE_NOISE = 1e-3

State = Mapping[str, Tensor]


class Regression(gpytorch.models.ExactGP):
    """An exact GP with constant mean and Gaussian noise."""

    def __init__(self, x: Tensor, y: Tensor, kernel: gpytorch.kernels.Kernel, noise_floor: float = 1e-4) -> None:
        constraint = gpytorch.constraints.GreaterThan(noise_floor)
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood(noise_constraint=constraint))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel
        self.to(x)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """Return the prior at `x`, shape ``(..., n, d)``."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Trainer:
    """A model in training; each call is one step of Adam on its exact marginal log likelihood."""

    def __init__(self, model: Regression, learning_rate: float = 0.05) -> None:
        self.model, self.loss = model.train(), math.nan
        self.objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        free = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(free, lr=learning_rate)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        loss = -self.objective(self.model(*self.model.train_inputs), self.model.train_targets)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.item()

    def gradient(self) -> Tensor:
        """Return the gradient of the last step as one vector, in float64."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return torch.cat([gradient.flatten().double() for gradient in gradients])


def scaled(family: str, d: int) -> gpytorch.kernels.ScaleKernel:
    """Return a scaled ARD kernel, ``"rbf"`` or ``"matern52"``, of `d` inputs."""
    families = {"rbf": gpytorch.kernels.RBFKernel, "matern52": gpytorch.kernels.MaternKernel}
    return gpytorch.kernels.ScaleKernel(families[family](ard_num_dims=d))


def uniform(n: int, d: int, seed: int) -> Tensor:
    """Return uniform points of the unit cube, ``(n, d)``, in float64."""
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noisy(values: Tensor, seed: int) -> Tensor:
    """Return `values` with normal noise of standard deviation 0.1."""
    return values + 0.1 * torch.randn(len(values), generator=torch.Generator().manual_seed(seed), dtype=values.dtype)


def smooth_trainer(family: str, n: int, dtype: torch.dtype, d: int = 8, device: str = "cpu") -> Trainer:
    """Return a trainer of a scaled ARD kernel on a smooth function, at the library's initial values."""
    x = uniform(n, d, seed=n)
    y = noisy((3 * x[:, 0]).sin() + x[:, 1] * x[:, 2], seed=n + 1)
    return Trainer(Regression(x.to(device, dtype), y.to(device, dtype), scaled(family, d)))


def surface_trainer(n: int, dtype: torch.dtype) -> Trainer:
    """Return a trainer on the first `n` of 1,000 points of a noisy surface over the unit square, at a noise of 1e-3.

    With so little noise the kernel matrix is nearly singular, and what stock's conjugate gradients leave out shows.
    """
    x = uniform(1000, 2, seed=0)
    y = noisy((6 * x[:, 0]).sin() * (4 * x[:, 1]).cos(), seed=1)
    model = Regression(x[:n].to(dtype), y[:n].to(dtype), scaled("rbf", 2))
    model.likelihood.noise = SURFACE_NOISE
    return Trainer(model)


def standardise(values: Tensor) -> Tensor:
    """Return the columns with mean 0 and standard deviation 1."""
    return (values - values.mean(0)) / values.std(0)


def diabetes_data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return scikit-learn's diabetes data, standardised: inputs ``(442, 10)`` and targets ``(442,)``."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=False)
    return standardise(torch.from_numpy(x)).to(dtype), standardise(torch.from_numpy(y)).to(dtype)


def diabetes_trainer(kernel: str, dtype: torch.dtype) -> Trainer:
    """Return a trainer of a scaled ARD kernel, ``"rbf"`` or ``"matern52"``, on the diabetes data."""
    x, y = diabetes_data(dtype)
    return Trainer(Regression(x, y, scaled(kernel, x.shape[-1])))


def positives(model: Regression) -> Tensor:
    """Return lengthscales, outputscale and noise of a model with a scaled kernel as one vector."""
    kernel = model.covar_module
    parts = (kernel.base_kernel.lengthscale, kernel.outputscale, model.likelihood.noise)
    return torch.cat([part.detach().flatten() for part in parts])


def co2_data() -> tuple[Tensor, Tensor]:
    """Return the weekly CO2 series of Mauna Loa: times ``(weeks, 1)`` and values ``(weeks,)``, both standardised.

    The 59 weeks without a value are interpolated, so that every week is one update.
    """
    from statsmodels.datasets import co2

    values = co2.load_pandas().data["co2"].interpolate().to_numpy(dtype=float, copy=True)
    weeks = torch.arange(len(values), dtype=torch.float64).unsqueeze(-1)
    return standardise(weeks), standardise(torch.from_numpy(values))


def co2_model(x: Tensor, y: Tensor) -> Regression:
    """Return a model with a given trend (RBF), a season to be fitted (Matérn 5/2) and a noise that is not tiny."""
    trend = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    season = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel())
    model = Regression(x, y, trend + season, noise_floor=1e-3)
    trend.outputscale, trend.base_kernel.lengthscale = 1.0, 1.0
    season.outputscale, season.base_kernel.lengthscale = 0.05, 0.05
    model.likelihood.noise = 0.01
    trend.requires_grad_(False)
    return model


def co2_hyperparameters(x: Tensor, y: Tensor, steps: int = 200) -> State:
    """Return the state of a model fitted to a few first weeks; two years do not tell a trend, so that is given."""
    trainer = Trainer(co2_model(x, y))
    for _ in range(steps):
        trainer()
    return trainer.model.state_dict()


def conditioned(x: Tensor, y: Tensor, state: State) -> Regression:
    """Return a new model on all of `x` and `y` with given hyperparameters, ready to predict."""
    model = co2_model(x, y)
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def predict(model: Regression, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance at `x` from the model's caches, the only place where fantasy updates leave a trace.

    Without `fast_pred_var` GPyTorch solves with the whole training matrix again for every variance.
    """
    with gpytorch.settings.fast_pred_var():
        posterior = model(x)
        return posterior.mean, posterior.variance


@torch.no_grad()
def exact_prediction(x: Tensor, y: Tensor, state: State, ahead: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance at `ahead` of a Cholesky refit, whatever the number of points."""
    with gpytorch.settings.max_cholesky_size(max(len(x), 800)):
        posterior = conditioned(x, y, state)(ahead)
        return posterior.mean, posterior.variance


class Stream:
    """A model that takes in one week per call, without gradients; last week's model is dropped."""

    def __init__(self, x: Tensor, y: Tensor, state: State, start: int) -> None:
        self.x, self.y, self.n = x, y, start
        self.model = conditioned(x[:start], y[:start], state)
        predict(self.model, x[:1])  # a model must have predicted once before it can be updated

    @torch.no_grad()
    def __call__(self) -> None:
        week = slice(self.n, self.n + 1)
        self.model = self.model.get_fantasy_model(self.x[week], self.y[week])
        self.n += 1


def dense_kernel(n: int, dtype: torch.dtype, noise: float = 0.1) -> Tensor:
    """Return an RBF kernel matrix plus noise, ``(n, n)``, on uniform points of the unit cube, built in place."""
    points = uniform(n, 3, seed=n).to(dtype)
    covariance = torch.cdist(points, points).square_().mul_(-0.5 / 0.2**2).exp_()
    covariance.diagonal().add_(noise)
    return covariance


class Solve:
    """Conjugate gradients through a dense operator; each call runs a fixed number of iterations from zero.

    The product is `DenseLinearOperator._matmul`, which is what `LinearOperator._solve` hands to `linear_cg`.
    """

    def __init__(self, covariance: Tensor, columns: int, iterations: int) -> None:
        generator = torch.Generator().manual_seed(1)
        rhs = torch.randn(len(covariance), columns, generator=generator, dtype=torch.float64)
        self.operator, self.rhs, self.iterations = DenseLinearOperator(covariance), rhs.to(covariance), iterations
        self.iterate = torch.zeros_like(self.rhs)

    def __call__(self) -> None:
        """Run all iterations; a tolerance of 0 is never reached, and linear_operator warns of that."""
        limits = {"tolerance": 0.0, "max_iter": self.iterations, "max_tridiag_iter": self.iterations}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)
            self.iterate = linear_operator.utils.linear_cg(self.operator._matmul, self.rhs, **limits)

    def residual(self) -> float:
        """Return the norm of the residual of the last iterate, relative to the right-hand sides."""
        tensor = self.operator.tensor
        return ((tensor @ self.iterate - self.rhs).norm() / self.rhs.norm()).item()
