"""Matérn processes on a line by their states: densities and gradients against dense float64 truth."""

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from support.models import ExactModel

import autokern
from autokern.core import registry
from autokern.core.problem import Feasibility, Problem
from autokern.core.settings import Settings
from autokern.density import gaussian, markov
from autokern.kernels import tree as trees
from autokern.kernels.tree import Node, Tree
from autokern.prediction.markov_posterior import LinePosterior
from autokern.runtime import dispatch
from autokern.tuning.chooser import Chooser, fitted
from autokern.tuning.policy import decide
from autokern.tuning.profile import Profile, Timing, Trial

pytestmark = pytest.mark.usefixtures("one_thread")

SUMS = [("matern12",), ("matern32",), ("matern52",), ("matern52", "matern32"), ("matern12", "matern52", "matern52")]
WEIGHTS = torch.tensor([1.3, 0.4, 0.2], dtype=torch.float64)


def _tree(families: tuple[str, ...], points: list[torch.Tensor], weights: torch.Tensor) -> Tree:
    leaves = tuple(Node("scale", children=(Node("leaf", name),)) for name in families)
    return Tree(Node("sum", children=leaves), points, [], list(weights.unbind()))


def _points(kind: str, n: int, generator: torch.Generator) -> torch.Tensor:
    x = torch.rand(n, generator=generator, dtype=torch.float64)
    if kind == "shuffled":
        return x
    x = x.sort().values
    if kind == "repeated":
        return (x * n / 5).round() / (n / 5)
    if kind == "apart":
        x = x * 50 + (torch.arange(n) > n // 2) * 1000
    return x * 0.1 if kind == "close" else x


@pytest.mark.parametrize("families", SUMS, ids="+".join)
@pytest.mark.parametrize("kind", ["sorted", "shuffled", "repeated", "apart", "close"])
def test_density_and_all_gradients_are_those_of_the_dense_covariance(families, kind):
    generator = torch.Generator().manual_seed(3)
    like = {"generator": generator, "dtype": torch.float64}
    growing, weights = 1 + 0.7 * torch.arange(len(families)).double(), WEIGHTS[: len(families)]
    settings = (0.1, 1e-4), (3.0, 1e-4), (3.0, 1.0), (0.3, None)
    for n, some in ((1, settings[2:]), (31, settings[:1]), (32, settings[1:2]), (33, settings[2:]), (200, settings)):
        for lengthscale, noise in some:
            x, own, draw = _points(kind, n, generator), torch.rand(n, **like) * 0.1 + 1e-3, torch.randn(n, **like)
            variances = own if noise is None else torch.full((1,), noise, dtype=torch.float64)
            found = []
            for density in (gaussian.reference, markov.log_prob):
                given = (lengthscale * growing, weights, variances, x.sin() + draw * 0.1)
                leaves = [t.clone().requires_grad_() for t in given]
                tree = _tree(families, [(x / one).unsqueeze(-1) for one in leaves[0]], leaves[1])
                value = density(tree, *leaves[2:])
                found.append([value.detach(), *torch.autograd.grad(value, leaves)])
            for truth, ours in zip(*found, strict=True):
                assert (truth - ours).abs().max() <= 1e-7 * truth.abs().max() + 1e-12, (n, lengthscale, noise)


@pytest.mark.parametrize("families", [("matern32",), ("matern52", "matern12")], ids="+".join)
def test_first_and_second_derivatives_by_differences(families):
    like = {"generator": torch.Generator().manual_seed(1), "dtype": torch.float64}
    for n, check in ((34, torch.autograd.gradcheck), (9, torch.autograd.gradgradcheck)):
        x = torch.rand(n, **like).sort().values * n / 10

        def density(scale, weights, noise, residual, x=x):
            tree = _tree(families, [(x / (scale * (i + 1))).unsqueeze(-1) for i in range(len(families))], weights)
            return markov.log_prob(tree, noise, residual)

        weights = torch.rand(len(families), **like) + 0.5
        inputs = torch.tensor(0.7, dtype=torch.float64), weights, torch.rand(n, **like) + 0.1, torch.randn(n, **like)
        assert check(density, tuple(t.requires_grad_() for t in inputs))


def _model(n: int, kernel, dtype=torch.float64, fixed=False):
    like = {"generator": torch.Generator().manual_seed(n), "dtype": torch.float64}
    x, noise, draw = torch.rand(n, 1, **like), torch.rand(n, **like) * 0.01 + 1e-3, torch.randn(n, **like)
    likelihood = FixedNoiseGaussianLikelihood(noise.to(dtype)) if fixed else GaussianLikelihood()
    return ExactModel(x.to(dtype), ((6 * x[:, 0]).sin() + 0.1 * draw).to(dtype), kernel, likelihood).to(dtype)


def test_a_singular_covariance_and_missing_numbers_are_left_to_stock():
    n = 100
    points, residual = torch.zeros(n, 1, dtype=torch.float64), torch.ones(n, dtype=torch.float64)
    tree, none = Tree(Node("leaf", "matern52"), [points], [], []), torch.zeros(1, dtype=torch.float64)
    assert markov.log_prob(tree, none, residual) is None
    assert markov.log_prob(tree, none + 0.1, residual * float("nan")) is None
    assert markov.log_prob(tree._replace(points=[points * float("nan")]), none + 0.1, residual) is None
    assert markov.log_prob(tree, none + 0.1, residual) is not None


@pytest.mark.parametrize("families", SUMS, ids="+".join)
@pytest.mark.parametrize("kind", ["shuffled", "repeated", "apart"])
def test_posterior_of_points_anywhere_is_that_of_the_dense_covariance(families, kind):
    generator = torch.Generator().manual_seed(5)
    like = {"generator": generator, "dtype": torch.float64}
    for n in (1, 24, 25, 310):
        x = _points(kind, n, generator)
        low, high = x.min() - 1, x.max() + 1
        new = torch.cat((torch.rand(50, **like) * (high - low) + low, x[:20], low[None], x.min()[None], x.max()[None]))
        noise, residual = torch.rand(n, **like) * 0.01 + 1e-3, x.sin() + torch.randn(n, **like)
        both = torch.cat((x, new))

        def tree(points):
            leaves = [points.unsqueeze(-1) / (0.3 + 0.5 * i) for i in range(len(families))]
            return _tree(families, leaves, WEIGHTS[: len(families)])

        k = trees.dense(tree(both))
        solved = torch.linalg.solve(k[:n, :n] + noise.diag(), k[:n, n:])
        posterior = LinePosterior(markov.chained(tree(x), noise, residual))
        mean, variance = posterior.at([z.squeeze(-1) for z in tree(new).points])
        covariance = k[n:, n:] - k[n:, :n] @ solved
        assert (mean - solved.mT @ residual).abs().max() <= 1e-9 * residual.abs().max()
        assert (variance - covariance.diagonal()).abs().max() <= 2e-9
        assert (k[n:, n:] - posterior.explained_covariance(k[n:, :n]) - covariance).abs().max() <= 1e-10
        assert (posterior.solve(k[:n, n:]) - solved).abs().max() <= 1e-6 * solved.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("fixed", [False, True])
def test_predictions_of_models_are_those_of_exact_stock(dtype, fixed):
    kernel = ScaleKernel(MaternKernel(2.5)) + ScaleKernel(ScaleKernel(MaternKernel(0.5)) + MaternKernel(1.5))
    model = _model(810, kernel, dtype, fixed=fixed).eval()
    x = torch.linspace(-1, 2, 600, dtype=dtype).unsqueeze(-1)
    bound = 1e-8 if dtype is torch.float64 else 1e-3

    def predicted(x):
        with torch.no_grad():
            latent = model(x)
            noisy = model.likelihood(latent) if not fixed else latent
            few = model(x[:30]).covariance_matrix
        return latent.mean, latent.variance, noisy.variance, noisy.stddev, few

    for lengthscale in (0.3, 0.8):  # the cache follows parameters
        model.covar_module.kernels[0].base_kernel.lengthscale = lengthscale
        model.train().eval()
        with autokern.enabled(), autokern.using(force={"predict": "state-space"}):
            found = predicted(x)
        assert set(dispatch.stats()["predict"]) == {"state-space"}
        model.double().train().eval()
        with gpytorch.settings.fast_computations(False, False, False):
            truth = predicted(x.double())
        model.to(dtype)
        for one, exact in zip(found, truth, strict=True):
            assert one.dtype is dtype
            assert (one - exact).abs().max() <= bound


def test_gradients_of_predictions_are_left_to_others():
    model = _model(900, ScaleKernel(MaternKernel(2.5))).eval()
    with autokern.enabled(), autokern.using(force={"predict": "state-space"}):
        model(torch.rand(5, 1, dtype=torch.float64)).mean.sum().backward()
    assert "state-space" not in dispatch.stats()["predict"]
    assert model.covar_module.raw_outputscale.grad is not None


def test_it_runs_unmeasured_on_a_host_that_has_measured_others():
    problem = Problem(op="exact_log_prob", m=3000, n=3000, d=1, grad="theta", variant="matern52/cg/line")
    timings = {"stock": Timing(0.5), "fused": Timing(0.3, 0.6)}
    trials = [Trial(problem.replace(m=n, n=n), timings) for n in (1500, 2000, 3000)]
    chooser = Chooser(fitted(Profile(trials=trials)))
    assert chooser.estimates(problem)
    table = Feasibility(registry.get("exact_log_prob"), problem)
    assert decide(table, chooser, Settings()).candidate == "state-space"
    assert decide(table, chooser, Settings(exclude=("state-space",))).candidate != "state-space"


@pytest.mark.parametrize("families", [("matern12",), ("matern32", "matern12"), ("matern52", "matern32")])
@pytest.mark.parametrize("noise", [1e-2, 1e-4, 1e-6, 1e-7, 3e-8])
def test_digits_that_states_lose_are_a_factors(families, noise):
    """The gradient by a constant mean is a sum that cancels, which shows them."""
    x = torch.linspace(0, 1, 700, dtype=torch.float64).unsqueeze(-1)
    leaves = [x / 0.7] * len(families)
    tree = _tree(families, leaves, torch.ones(len(families), dtype=torch.float64))
    noises, mean = torch.tensor([noise], dtype=torch.float64), torch.zeros(1, dtype=torch.float64, requires_grad=True)
    residual = (6 * x[:, 0]).sin() - mean
    exact = torch.linalg.solve(trees.dense(tree) + noises * torch.eye(700), residual.detach()).sum()
    found, loose = (markov.log_prob(tree, noises, residual, exact=exact) for exact in (True, False))
    data = markov.chained(tree, noises, residual.detach())
    most = markov.MOST[torch.float64]
    assert loose is not None
    assert LinePosterior(data).valid
    assert LinePosterior(data, most).valid == (found is not None)
    assert found is not None or noise < 1e-2
    if found is not None:
        (slope,) = torch.autograd.grad(found, mean)
        torch.testing.assert_close(slope.squeeze(), exact, rtol=3e-8, atol=0.0)
    else:
        (slope,) = torch.autograd.grad(loose, mean)
        assert (slope - exact).abs() > 1e-10 * exact.abs()
