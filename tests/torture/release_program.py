"""What the torture of unknown releases runs: parts of a program, each of two phases on the same objects.

A part is a generator: it yields once between its phases, where the torture may change the libraries while models live,
and notes what it computes. It uses public names alone, which a release would keep.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch import constraints, kernels, likelihoods, means, priors
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.operators import KroneckerProductLinearOperator

sys.path.append(str(Path(__file__).parents[2] / "calibration"))

import support_cases as cases

Note = Callable[[str, Any], None]
Part = Callable[[Note], Iterator[None]]
PARTS: dict[str, Part] = {}
"""Parts by name, in the order in which they run."""


def part(function: Part) -> Part:
    PARTS[function.__name__.replace("_", " ")] = function
    return function


class Exact(cases.Exact):
    """A model with a mean of its own."""

    def __init__(self, x: Any, y: torch.Tensor, likelihood: Any, mean: Any, kernel: Any) -> None:
        super().__init__(x, y, likelihood, kernel)
        self.mean_module = mean


def nudged(t: torch.Tensor) -> torch.Tensor:
    """Change numbers by ``T14_NUDGE`` of themselves."""
    return t * (1 + float(os.environ.get("T14_NUDGE", "0")))


cases.points = lambda n, d: nudged(torch.rand(n, d, dtype=torch.float64))


def data(n: int, d: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, generator=made, dtype=torch.float64)
    noise = torch.randn(n, generator=made, dtype=torch.float64)
    return nudged(x), nudged((4 * x).sin().sum(-1) + 0.1 * noise)


def of(model: Exact) -> cases.Made:
    model = model.double()
    (x,), y = model.train_inputs, model.train_targets
    return cases.steps(model, model.likelihood, y, (x,), (data(7, x.shape[-1], 5)[0],))


def model_of(kernel: Any, mean: Any = None, likelihood: Any = None, n: int = 40, d: int = 2) -> cases.Made:
    likelihood = likelihoods.GaussianLikelihood() if likelihood is None else likelihood
    return of(Exact(*data(n, d), likelihood, means.ConstantMean() if mean is None else mean, kernel))


def trained(note: Note, name: str, made: cases.Made, steps: int = 2) -> None:
    """Note losses, their terms' gradients, and where a few steps lead."""
    mll = made.mll.train()
    optimizer = torch.optim.SGD(mll.model.parameters(), lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        loss = -mll(mll.model(*made.inputs), made.targets).sum()
        loss.backward()
        note(f"{name} loss {step}", loss)
        for of, value in mll.model.named_parameters():
            if value.grad is not None:
                note(f"{name} gradient {step} {of}", value.grad)
        optimizer.step()


def predicted(note: Note, name: str, made: cases.Made, fast: bool = False) -> None:
    """Note a prediction with its covariance, its gradient and a sample."""
    model, likelihood, points = made.mll.model.eval(), made.mll.likelihood.eval(), made.new[0].clone().requires_grad_()
    given = isinstance(likelihood, likelihoods.FixedNoiseGaussianLikelihood)
    noise = {"noise": torch.full((7,), 0.05, dtype=torch.float64)} if given else {}
    with gpytorch.settings.fast_pred_var(fast):
        latent = model(points)
        note(f"{name} mean", latent.mean)
        note(f"{name} variance", latent.variance)
        note(f"{name} gradient", torch.autograd.grad(latent.mean.sum() + latent.variance.sum(), points)[0])
    with torch.no_grad(), gpytorch.settings.fast_pred_var(fast):
        note(f"{name} latent covariance", model(points).covariance_matrix)
        torch.manual_seed(3)
        note(f"{name} sample", model(points).rsample(torch.Size([2])))
        seen = likelihood(model(points), **noise)
        if isinstance(seen, MultivariateNormal):
            note(f"{name} covariance", seen.covariance_matrix)
            note(f"{name} interval", torch.stack(seen.confidence_region()))
            note(f"{name} density", seen.log_prob(torch.zeros_like(seen.mean)))


def constrained() -> cases.Made:
    noise = likelihoods.GaussianLikelihood(
        noise_prior=priors.GammaPrior(1.1, 0.05), noise_constraint=constraints.GreaterThan(1e-4)
    )
    base = kernels.RBFKernel(
        ard_num_dims=2, lengthscale_prior=priors.GammaPrior(3.0, 6.0), lengthscale_constraint=constraints.Positive()
    )
    kernel = kernels.ScaleKernel(base, outputscale_prior=priors.LogNormalPrior(0.0, 1.0))
    mean = means.ConstantMean(constant_prior=priors.NormalPrior(0.0, 1.0))
    return model_of(kernel, mean, noise)


def bounded() -> cases.Made:
    noise = likelihoods.GaussianLikelihood(noise_constraint=constraints.Interval(1e-4, 1.0))
    noise.noise = 0.1
    base = kernels.MaternKernel(1.5, lengthscale_constraint=constraints.Interval(0.01, 3.0))
    base.lengthscale = 0.4
    kernel = kernels.ScaleKernel(base, outputscale_constraint=constraints.LessThan(5.0))
    return model_of(kernel, means.LinearMean(2), noise)


def composed() -> cases.Made:
    periodic, line = kernels.PeriodicKernel(), kernels.LinearKernel(active_dims=[1])
    rough = kernels.RQKernel(active_dims=[0]) * kernels.MaternKernel(0.5)
    return model_of(kernels.ScaleKernel(periodic + kernels.MaternKernel(2.5)) + line + rough, means.ZeroMean())


def one_dimensional() -> cases.Made:
    return model_of(kernels.ScaleKernel(kernels.MaternKernel(1.5)), n=450, d=1)


def fixed_noise() -> cases.Made:
    noise = torch.linspace(0.01, 0.2, 40, dtype=torch.float64)
    likelihood = likelihoods.FixedNoiseGaussianLikelihood(noise, learn_additional_noise=True)
    return model_of(kernels.ScaleKernel(kernels.MaternKernel(2.5, ard_num_dims=2)), likelihood=likelihood)


class Modes(Exact):
    """A model of values at four places."""

    def forward(self, x: torch.Tensor) -> MultivariateNormal:
        places = torch.linspace(0, 1, 4, dtype=x.dtype).unsqueeze(-1)
        product = KroneckerProductLinearOperator(self.covar_module(x), self.covar_module.base_kernel(places))
        return MultivariateNormal(x.new_zeros(4 * len(x)), product)


def of_modes() -> cases.Made:
    x, y = data(9)
    kernel = kernels.ScaleKernel(kernels.RBFKernel())
    values = (y.unsqueeze(-1) * torch.linspace(0.5, 1, 4)).flatten()
    return of(Modes(x, values, likelihoods.GaussianLikelihood(), means.ZeroMean(), kernel))


TWO = torch.Size([2])


class Independent(Exact):
    """Two tasks as a batch of independent models."""

    def forward(self, x: torch.Tensor) -> MultivariateNormal:
        batch = MultivariateNormal(self.mean_module(x), self.covar_module(x))
        return MultitaskMultivariateNormal.from_batch_mvn(batch)


def independent(n: int = 20) -> cases.Made:
    x, y = data(n)
    kernel = kernels.ScaleKernel(kernels.RBFKernel(batch_shape=TWO), batch_shape=TWO)
    likelihood = likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
    mean = means.ConstantMean(batch_shape=TWO)
    return of(Independent(x, torch.stack([y, y.cos()], -1), likelihood, mean, kernel))


def grid() -> cases.Made:
    made = kernels.GridInterpolationKernel(kernels.RBFKernel(), grid_size=12, num_dims=2, grid_bounds=[(-0.2, 1.2)] * 2)
    return model_of(kernels.ScaleKernel(made))


def _of_models(name: str, *makes: Callable[[], cases.Made]) -> None:
    def run(note: Note) -> Iterator[None]:
        models = {str(number): make() for number, make in enumerate(makes)}
        for name, model in models.items():
            trained(note, f"{name} first", model)
            predicted(note, f"{name} predicted", model)
        yield
        for name, model in models.items():
            trained(note, f"{name} then", model, 1)
            predicted(note, f"{name} again", model)
            predicted(note, f"{name} fast", model, fast=True)

    PARTS[name] = run


_of_models("training with priors", constrained)
_of_models("training within bounds", bounded)
_of_models("training of sums and products", composed)
_of_models("training on a line", one_dimensional)
_of_models("fixed noise", fixed_noise)
_of_models("tasks", cases.MODELS["multitask, Kronecker"])


@part
def modes(note: Note) -> Iterator[None]:
    model = of_modes()
    trained(note, "modes", model)
    yield
    trained(note, "modes again", model)


_of_models("batches", cases.MODELS["ExactGP, a batch of two"], independent)
_of_models("inducing and grids", cases.MODELS["SGPR (InducingPointKernel)"], grid)
_of_models("variational", *(cases.MODELS[f"SVGP, {of}Likelihood"] for of in ("Gaussian", "Bernoulli")))


@part
def fantasies(note: Note) -> Iterator[None]:
    model = model_of(kernels.ScaleKernel(kernels.MaternKernel(2.5))).mll.model.eval()
    with torch.no_grad():
        note("before", model(data(5, 2, 4)[0]).mean)
        yield
        x, y = data(3, 2, 6)
        fantasy = model.get_fantasy_model(x, torch.stack([y, y + 1]))
        seen = fantasy(data(5, 2, 4)[0])
        note("mean", seen.mean)
        note("covariance", seen.covariance_matrix)
        single = model.get_fantasy_model(x[:1], y[:1])(data(5, 2, 4)[0])
        note("of one point", single.covariance_matrix)


@part
def operators(note: Note) -> Iterator[None]:
    from linear_operator import operators as lo
    from linear_operator import to_linear_operator
    from linear_operator.utils.cholesky import psd_safe_cholesky

    y = data(30)[1]
    root = data(30, 30, 3)[0] + 3 * torch.eye(30, dtype=torch.float64)
    dense = (root @ root.mT / 30).requires_grad_()
    right = torch.stack([y, y.cos()], -1)
    for phase in range(2):
        matrix = to_linear_operator(dense)
        jittered = matrix.add_jitter(0.1)
        quad, logdet = jittered.inv_quad_logdet(right, logdet=True)
        note(f"quad {phase}", quad)
        note(f"logdet {phase}", logdet)
        note(f"gradient {phase}", torch.autograd.grad(quad + logdet, dense)[0])
        note(f"solve {phase}", jittered.solve(right))
        note(f"root {phase}", jittered.root_decomposition().to_dense())
        note(f"inverse root {phase}", jittered.root_inv_decomposition().to_dense())
        note(f"cholesky {phase}", psd_safe_cholesky(dense))
        note(f"eigh {phase}", matrix.eigh()[0])
        if phase == 0:
            yield
    diagonal = lo.DiagLinearOperator(torch.linspace(0.5, 1.0, 30, dtype=torch.float64))
    low = lo.RootLinearOperator(root[:, :4]) + diagonal
    note("low rank solve", low.solve(y))
    note("low rank logdet", low.logdet())
    small = to_linear_operator(dense[:4, :4].detach() + torch.eye(4))
    kron = lo.KroneckerProductLinearOperator(small, small).add_jitter(0.5)
    note("kronecker solve", kron.solve(torch.ones(16, dtype=torch.float64)))
    note("kronecker logdet", kron.logdet())
    line = lo.ToeplitzLinearOperator(torch.tensor([2.0, 0.5, 0.1, 0.0, 0.0], dtype=torch.float64))
    note("toeplitz", line @ torch.arange(5.0, dtype=torch.float64))
    grown = matrix.add_jitter(0.1).cat_rows(torch.zeros(1, 30, dtype=torch.float64) + 0.1, 2 * torch.eye(1).double())
    note("grown", grown.to_dense())
    with gpytorch.settings.max_cholesky_size(1), gpytorch.settings.cg_tolerance(1e-10):
        note("iterated", to_linear_operator(dense.detach()).add_jitter(0.5).solve(y))


@part
def distributions(note: Note) -> Iterator[None]:
    x, y = data(20)
    kernel = kernels.ScaleKernel(kernels.RBFKernel()).double()
    mean = y.clone().requires_grad_()
    for phase in range(2):
        prior = MultivariateNormal(mean, kernel(x).add_jitter(0.1))
        note(f"density {phase}", prior.log_prob(torch.zeros_like(y)))
        note(f"gradient {phase}", torch.autograd.grad(prior.log_prob(y.cos()), mean)[0])
        torch.manual_seed(2)
        note(f"sample {phase}", prior.rsample(torch.Size([2])))
        note(f"entropy {phase}", prior.entropy())
        other = MultivariateNormal(torch.zeros_like(y), kernel(x).add_jitter(0.3))
        note(f"divergence {phase}", torch.distributions.kl_divergence(prior, other))
        note(f"cross {phase}", kernel(x, x[:3] + 0.1).to_dense())
        note(f"product {phase}", kernel(x) @ y)
        if phase == 0:
            yield


@part
def a_bayesian_loop(note: Note) -> Iterator[None]:
    from botorch.acquisition import LogExpectedImprovement, qLogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.transforms import Normalize, Standardize
    from botorch.optim import optimize_acqf
    from botorch.sampling import SobolQMCNormalSampler

    x, y = data(14)
    bounds = torch.stack([torch.zeros(2), torch.ones(2)]).double()
    model = SingleTaskGP(
        x, y.unsqueeze(-1), outcome_transform=Standardize(m=1), input_transform=Normalize(d=2, bounds=2 * bounds)
    )
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), optimizer_kwargs={"options": {"maxiter": 4}})
    for of, value in model.named_parameters():
        note(f"fitted {of}", value)
    points = data(6, 2, 8)[0].reshape(3, 2, 2)
    for phase in range(2):
        posterior = model.posterior(points)
        note(f"mean {phase}", posterior.mean)
        note(f"variance {phase}", posterior.variance)
        best = qLogExpectedImprovement(model, y.max(), sampler=SobolQMCNormalSampler(torch.Size([8]), seed=1))
        note(f"improvement {phase}", best(points))
        note(f"of one {phase}", LogExpectedImprovement(model, y.max())(points[:, :1]))
        if phase == 0:
            yield
    torch.manual_seed(7)
    starts = data(4, 2, 9)[0].reshape(2, 2, 2)
    found, value = optimize_acqf(
        best, bounds, q=2, num_restarts=2, batch_initial_conditions=starts, options={"maxiter": 4}
    )
    note("candidates", found)
    note("value", value)
    fantasy = model.condition_on_observations(points[0], y[:2].unsqueeze(-1))
    note("conditioned", fantasy.posterior(points[1]).mean)
