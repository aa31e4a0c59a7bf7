"""Densities by each way: values, first and second derivatives, and what autograd may ask of them."""

import gpytorch
import pytest
import torch
from gpytorch import kernels as k
from gpytorch.constraints import Interval
from gpytorch.likelihoods import DirichletClassificationLikelihood, FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean, LinearMean, ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior, SmoothedBoxPrior
from linear_operator.utils.warnings import NumericalWarning
from support.array_kernels import KERNELS, TASKS, of_kernel, tasks
from support.densities import (
    D,
    Deep,
    Model,
    N,
    agree,
    by,
    derivatives,
    made,
    of_both_orders,
    served,
    truth,
    value_of,
    without_factor,
)
from support.models import ExactModel
from support.readings import Model as Plain

import autokern
from autokern.density import exact_objective
from autokern.density.gaussian import dense

pytestmark = pytest.mark.usefixtures("one_thread", "enabled")
B = torch.Size([3])
BARE = [name for name, make in KERNELS.items() if not (type(make()) is k.LinearKernel or list(make().named_priors()))]
"""Kernels without priors; one that is linear alone, the library solves by its rank."""


by_arrays = pytest.mark.parametrize("way", ["objective", "arrays"])


def known(first, last, *shape, **more):
    """A likelihood of known noise, from the first to the last number."""
    noise = torch.linspace(first, last, torch.Size(shape).numel(), dtype=torch.float64)
    return FixedNoiseGaussianLikelihood(noise.view(shape), **more)


CASES = {
    "zero mean": lambda: made(k.RBFKernel(), ZeroMean()),
    "a constraint of the mean": lambda: made(k.RBFKernel(), ConstantMean(constant_constraint=Interval(-1.0, 1.0))),
    "known noise": lambda: made(k.RBFKernel(), likelihood=known(0.1, 0.4, N)),
    "a mean without bias": lambda: made(k.RBFKernel(), LinearMean(D, bias=False)),
    "fixed lengthscale": lambda: made(k.ScaleKernel(k.RBFKernel().requires_grad_(False))),
    "a linear mean": lambda: made(k.ScaleKernel(k.RBFKernel(ard_num_dims=D)) + k.MaternKernel(2.5), LinearMean(D)),
    "priors": lambda: made(
        k.ScaleKernel(k.RBFKernel(lengthscale_prior=GammaPrior(3.0, 6.0)), outputscale_prior=LogNormalPrior(0.1, 1.0)),
        ConstantMean(constant_prior=NormalPrior(0.1, 0.7)),
        GaussianLikelihood(noise_prior=GammaPrior(1.1, 0.05)),
    ),
}


SQUARE = {"n": 3, "batch": B}
BATCHES = {
    "deep batch": lambda: made(k.RBFKernel(batch_shape=B), batch=B, kind=Deep),
    "batch with priors": lambda: made(k.RBFKernel(batch_shape=B, lengthscale_prior=GammaPrior(3.0, 6.0)), batch=B),
    "batch with boxes": lambda: made(
        k.RBFKernel(batch_shape=B, lengthscale_prior=SmoothedBoxPrior(0.1, 0.5)),
        likelihood=GaussianLikelihood(batch_shape=B, noise_prior=SmoothedBoxPrior(0.1, 0.5)),
        batch=B,
    ),
    "all": lambda: made(k.ScaleKernel(k.RBFKernel(batch_shape=B, ard_num_dims=D), batch_shape=B), batch=B),
    "a sum": lambda: made(k.RBFKernel(batch_shape=B) + k.MaternKernel(2.5, batch_shape=B, active_dims=[1]), batch=B),
    "common noise": lambda: made(k.MaternKernel(1.5, batch_shape=B), likelihood=GaussianLikelihood(), batch=B),
    "common mean": lambda: made(k.RBFKernel(batch_shape=B), mean=LinearMean(D), batch=B),
    "common targets": lambda: made(k.RBFKernel(batch_shape=B), likelihood=GaussianLikelihood(batch_shape=B)),
    "known noise of each": lambda: made(k.RBFKernel(batch_shape=B), likelihood=known(0.1, 0.1, *B, N), batch=B),
    "a batch of one": lambda: made(k.RBFKernel(batch_shape=torch.Size([1])), batch=(1,)),
    "two dimensions": lambda: made(k.RBFKernel(batch_shape=torch.Size([2, 2])), batch=(2, 2)),
    "one point": lambda: made(k.RBFKernel(batch_shape=B), batch=B, n=1),
    "as many points as models": lambda: made(k.RBFKernel(batch_shape=B, ard_num_dims=D), **SQUARE),
    "common noise of as many": lambda: made(k.RBFKernel(batch_shape=B), likelihood=GaussianLikelihood(), **SQUARE),
    "known noise of as many": lambda: made(k.RBFKernel(batch_shape=B), likelihood=known(0.1, 0.9, 3, 3), **SQUARE),
    "known and further noise": lambda: made(
        k.RBFKernel(batch_shape=B),
        likelihood=known(0.1, 0.9, 3, N, learn_additional_noise=True, batch_shape=B),
        batch=B,
    ),
    "classes": lambda: made(
        k.RBFKernel(batch_shape=B),
        likelihood=DirichletClassificationLikelihood(torch.arange(N) % 3, dtype=torch.float64),
        batch=B,
    ),
}
LEFT = {
    "objective": ["common noise", "common mean", "common targets", "common noise of as many"],
    "arrays": ["one point"],
}
"""Batches that a way leaves to others."""


@pytest.fixture
def together(monkeypatch):
    """Lets models of a batch be evaluated together, or one after the other."""

    def change(whether):
        monkeypatch.setattr(exact_objective, "LEAST", 2 if whether else float("inf"))
        exact_objective.places.cache_clear()

    yield change
    exact_objective.places.cache_clear()


@by_arrays
@pytest.mark.parametrize("points", ["common", "own"])
@pytest.mark.parametrize("name", [*CASES, *BATCHES, *(f"{name} together" for name in BATCHES)])
def test_values_and_derivatives(name, points, way, together):
    together(name.endswith(" together"))
    name = name.removesuffix(" together")
    mll = {**CASES, **BATCHES}[name]()
    if points == "own":
        x, batch = mll.model.train_inputs[0], mll.model.covar_module.batch_shape
        x = torch.stack([x + at for at in range(batch.numel())]).view(*batch, *x.shape)
        mll.model.set_train_data(x, strict=False)
    with by("fused"):
        expected = derivatives(mll)
    with by(way):
        found = derivatives(mll)
    assert served(way) == 1 or name in LEFT[way]
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-12)
    agree(found, expected, both=name in CASES, rtol=1e-8, atol=1e-9)  # both: what has none, depends on the formula
    autokern.disable()
    stock = derivatives(mll, second=False)
    autokern.enable()
    torch.testing.assert_close(found[: len(stock)], stock, rtol=1e-7, atol=1e-9)


@pytest.mark.thin("name", "kind")
@pytest.mark.parametrize("kind", [ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood])
@pytest.mark.parametrize("name", KERNELS)
def test_models_that_are_evaluated_together_are_those_that_are_evaluated_alone(name, kind, together):
    kernel = KERNELS[name]()
    for module in kernel.modules():
        for own, p in [*module._parameters.items()]:
            setattr(module, own, torch.nn.Parameter(torch.stack([p.detach() + 0.1 * at for at in range(5)])))
        if isinstance(module, k.Kernel):
            module.batch_shape = torch.Size([5])
    noisy = known(0.1, 0.9, 5, N, learn_additional_noise=True, batch_shape=torch.Size([5]))
    mll = made(kernel, batch=(5,), likelihood=noisy, kind=Plain)
    mll = kind(mll.likelihood, tasks(mll, (2, 2), (3, 3)).model if name in TASKS else mll.model).train()
    found = []
    for whether in (False, True):
        together(whether)
        reading = exact_objective.Reading(mll)
        loss, slopes = reading.evaluate({own: p for own, p in mll.named_parameters() if p.requires_grad})
        found.append([loss, *map(torch.clone, slopes)])
        assert len(reading._ones) == (1 if whether else 5)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-11)
    assert found[0][0].unique().numel() == 5
    noisy.second_noise_covar.raw_noise.data[2] = torch.nan
    assert reading.evaluate({}) is None


@pytest.mark.filterwarnings("ignore:A not p.d.")  # stock's own, for a linear kernel on few features
@pytest.mark.thin("name way", "kind way", "n kind")
@by_arrays
@pytest.mark.parametrize("kind", [Model, Deep])
@pytest.mark.parametrize("n", [2, 12, 40])
@pytest.mark.parametrize("name", BARE)
def test_points_that_are_given_and_points_that_a_network_makes(name, n, kind, way):
    mll = of_kernel(name, made, n=n, kind=Model if name in TASKS else kind)
    expected = truth(mll)
    with by(way):
        found = derivatives(mll)
    assert served(way) == 1
    torch.testing.assert_close(found[0], expected[0], rtol=1e-11, atol=1e-11)
    agree(found, expected, both=True, rtol=1e-6, atol=1e-8)
    autokern.disable()
    torch.testing.assert_close(value_of(mll).detach(), expected[0], rtol=1e-7, atol=1e-7)
    autokern.enable()


@by_arrays
def test_points_on_which_a_kernel_does_not_depend_have_no_gradient_with_a_graph(way):
    mll = of_kernel("categories alike", made)
    points = mll.model.train_inputs[0].clone().requires_grad_()

    def found():
        loss = mll(mll.model.forward(points), mll.model.train_targets)
        return torch.autograd.grad(loss, [*mll.parameters(), points], create_graph=True, allow_unused=True)

    autokern.disable()
    expected = found()
    autokern.enable()
    with by(way):
        slopes = found()
    assert slopes[-1] is expected[-1] is None
    torch.testing.assert_close(slopes[:-1], expected[:-1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("way", ["objective", "arrays", "fused"])
def test_second_derivatives_have_jitter_where_single_precision_has_no_factor(way):
    with gpytorch.settings.min_fixed_noise(float_value=1e-10), by(way):
        noisy = FixedNoiseGaussianLikelihood(torch.full((165,), 2e-7))
        mll = made(k.RBFKernel(), likelihood=noisy, n=165, dtype=torch.float32)
        with pytest.warns(NumericalWarning, match="A not p.d., added jitter of 1.0e-06"):  # as the library's loss
            found = of_both_orders(value_of(mll), list(mll.parameters()))
    assert all(slope.isfinite().all() for slope in found)


NEAR = {
    "matern12": lambda: k.MaternKernel(0.5),
    "matern12 ard": lambda: k.MaternKernel(0.5, ard_num_dims=2),
    "matern32": lambda: k.MaternKernel(1.5),
    "rbf": k.RBFKernel,
    "rq": k.RQKernel,
}


@pytest.mark.parametrize("make", NEAR.values(), ids=NEAR)
def test_points_that_meet_and_points_far_away_have_gradients(make):
    """Against differences: the library's own are some 1e-10 off where ARD is on."""
    x = torch.rand(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[1], x[3], x[5] = x[0], x[2] + 1e-8, x[4] + 1e-4
    likelihood, kernel = GaussianLikelihood().double(), k.ScaleKernel(make()).double()
    for at in (x, 1e4 * x, 40 + x):
        points, others = at.clone().requires_grad_(), at.clone().requires_grad_()
        prior = gpytorch.distributions.MultivariateNormal(x.sum(-1), kernel(points))
        covariance = dense(kernel, others) + likelihood.noise * torch.eye(8, dtype=x.dtype)
        exact = torch.distributions.MultivariateNormal(x.sum(-1), covariance).log_prob(x[:, 0])
        parameters = [*kernel.parameters(), *likelihood.parameters()]
        with by("arrays"):
            found = likelihood(prior).log_prob(x[:, 0])
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=0)
        ours, theirs = (torch.autograd.grad(v, [z, *parameters]) for v, z in ((found, points), (exact, others)))
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kernel", [k.RBFKernel, k.LinearKernel])
@pytest.mark.parametrize("kind", [ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood])
@pytest.mark.parametrize("way", ["objective", "arrays", "fused", "dense"])
def test_no_factor_means_the_librarys_own_words(way, kind, kernel):
    """What the library says of a kernel of low rank is not what it says of others."""
    mll = without_factor(k.PiecewisePolynomialKernel(0, ard_num_dims=D) if way == "dense" else kernel())
    mll = kind(mll.likelihood, mll.model).train()
    with by(way), pytest.raises(Exception, match=r"not positive|not p\.d\."), pytest.warns():
        value_of(mll)


@pytest.mark.parametrize("name", ["raw_lengthscale", "raw_outputscale"])
def test_a_parameter_whose_batch_is_not_the_kernels_is_the_librarys_error(name: str) -> None:
    kernel = k.ScaleKernel(k.RBFKernel(ard_num_dims=3))
    owner = kernel if name == "raw_outputscale" else kernel.base_kernel
    setattr(owner, name, torch.nn.Parameter(getattr(owner, name).detach()[None]))
    x = torch.rand(20, 3)
    for kind in (True, False):
        model = ExactModel(x, x.sum(-1), kernel).train(kind)
        with autokern.enabled(), pytest.raises(RuntimeError, match="The expected shape of the kernel was"):
            model.likelihood(model(x if kind else x[:3])).log_prob(x.sum(-1))
