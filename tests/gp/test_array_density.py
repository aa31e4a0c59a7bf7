"""Densities by arrays are those of the fused function: values, first and second derivatives, and what may change."""

from __future__ import annotations

import gc
import threading
import weakref

import gpytorch
import pytest
import torch
from botorch.models.kernels.categorical import CategoricalKernel
from botorch.models.kernels.positive_index import PositiveIndexKernel
from gpytorch.constraints import Interval
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    IndexKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    PolynomialKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.likelihoods import DirichletClassificationLikelihood, FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean, LinearMean
from gpytorch.mlls import ExactMarginalLogLikelihood

import autokern
from autokern.gp import array_density
from autokern.gp.array_density import dense

N, D = 12, 3
KERNELS = {
    "rbf": lambda: RBFKernel(ard_num_dims=D),
    "matern32": lambda: ScaleKernel(MaternKernel(1.5, ard_num_dims=D)),
    "matern52": lambda: ScaleKernel(MaternKernel(2.5, active_dims=[0, 2], ard_num_dims=2)),
    "sum": lambda: AdditiveKernel(ScaleKernel(RBFKernel(active_dims=[1])), MaternKernel(2.5)),
    "product": lambda: ScaleKernel(ProductKernel(RBFKernel(active_dims=[0]), MaternKernel(1.5, ard_num_dims=D))),
    "product of one": lambda: ScaleKernel(AdditiveKernel(ProductKernel(RBFKernel()), ProductKernel(MaternKernel(2.5)))),
    "rq": lambda: ScaleKernel(RQKernel(ard_num_dims=D)),
    "matern12": lambda: ScaleKernel(MaternKernel(0.5, ard_num_dims=D)),
    "periodic": lambda: ScaleKernel(PeriodicKernel(active_dims=[1])) + RBFKernel(),
    "interval": lambda: RBFKernel(lengthscale_constraint=Interval(0.05, 4.0)),
}


OTHERS = {
    "linear": lambda: LinearKernel(ard_num_dims=D),
    "linear in a sum": lambda: AdditiveKernel(ScaleKernel(RBFKernel(ard_num_dims=D)), LinearKernel(active_dims=[1])),
    "linear in a product": lambda: ScaleKernel(RBFKernel() * LinearKernel(active_dims=[2])) + ConstantKernel(),
    "polynomial": lambda: ScaleKernel(PolynomialKernel(2)),
    "spectral mixture": lambda: SpectralMixtureKernel(2, ard_num_dims=D) + RBFKernel(active_dims=[1]),
    "smooth and rough": lambda: MaternKernel(0.5, active_dims=[0, 0]) + PolynomialKernel(3, active_dims=[1, 1]),
    "categories": lambda: ScaleKernel(CategoricalKernel(active_dims=[0], ard_num_dims=1)) + RBFKernel(),
    "tasks": lambda: RBFKernel(active_dims=[1, 2]) * IndexKernel(3, rank=2, active_dims=[0]),
    "tasks that are alike": lambda: RBFKernel() * PositiveIndexKernel(3, rank=2, active_dims=[0]),
}


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel, mean):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = mean, kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x.sin()), self.covar_module(x))


def made(kernel, mean=None, likelihood=None, n=N, dtype=torch.float64, batch=()):
    generator = torch.Generator().manual_seed(n)
    x = torch.rand(n, D, generator=generator, dtype=torch.float64)
    y = x.sum(-1).cos() + 0.1 * torch.randn(*batch, n, generator=generator, dtype=torch.float64)
    likelihood = likelihood or GaussianLikelihood(batch_shape=torch.Size(batch))
    mean = mean or ConstantMean(batch_shape=torch.Size(batch))
    model = Model(x.to(dtype), y.to(dtype), likelihood, kernel, mean).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.rand(p.shape, generator=generator))
    return ExactMarginalLogLikelihood(likelihood, model).train()


def loss_of(mll):
    return -mll(mll.model(*mll.model.train_inputs), mll.model.train_targets)


def by(name):
    return autokern.using(force={"exact_log_prob": name, "objective": "stock"})


@pytest.fixture(autouse=True)
def _enabled():
    with autokern.enabled():
        yield


@pytest.fixture
def served(monkeypatch):
    """How many densities were computed by arrays."""
    counts, stock = {"arrays": 0}, array_density.log_prob

    def counted(*args):
        found = stock(*args)
        counts["arrays"] += found is not None
        return found

    monkeypatch.setattr(array_density, "log_prob", counted)
    return counts


def derivatives(mll):
    """Value, gradients and a second derivative of every parameter, of a weighted sum for a batch."""
    parameters = list(mll.parameters())
    losses = loss_of(mll)
    loss = (losses * torch.linspace(1, 2, losses.numel(), dtype=losses.dtype).view(losses.shape)).sum()
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    second = torch.autograd.grad(sum((g * (k + 1)).sum() for k, g in enumerate(first)), parameters)
    return loss.detach(), [g.detach() for g in first], second


@pytest.mark.parametrize("mean", [ConstantMean, lambda: LinearMean(D)], ids=["constant", "linear"])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_values_and_derivatives(kernel, mean, served):
    mll = made(kernel(), mean())
    with by("fused"):
        expected = derivatives(mll)
    with by("arrays"):
        found = derivatives(mll)
        loss = loss_of(mll)
        loss.backward()
    assert served["arrays"] == 2
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-12)
    for one, other, p in zip(found[1], expected[1], mll.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11)
        torch.testing.assert_close(p.grad, one, rtol=1e-10, atol=1e-12)
    for one, other in zip(found[2], expected[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def truth(mll):
    """Value and derivatives by explicit matrices alone, all summands and factors apart."""
    x, y = mll.model.train_inputs[0], mll.model.train_targets
    k = dense(mll.model.covar_module, x) + mll.likelihood.noise * torch.eye(len(x), dtype=x.dtype)
    mean = mll.model.mean_module(x.sin())
    loss = -torch.distributions.MultivariateNormal(mean, k).log_prob(y) / len(x)
    parameters = list(mll.parameters())
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    second = torch.autograd.grad(sum((g * (k + 1)).sum() for k, g in enumerate(first)), parameters)
    return loss.detach(), [g.detach() for g in first], second


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, of index kernels
@pytest.mark.parametrize("kernel", OTHERS.values(), ids=OTHERS.keys())
def test_kernels_that_are_no_trees(kernel, served):
    mll = made(kernel())
    x = mll.model.train_inputs[0]
    x[:, 0] = torch.arange(len(x)) % 3
    if type(mll.model.covar_module) is LinearKernel:  # a linear kernel alone is the library's
        mll.model.covar_module = mll.model.covar_module + ConstantKernel().double()
    expected = truth(mll)
    with by("arrays"):
        found = derivatives(mll)
    assert served["arrays"] == 1
    torch.testing.assert_close(found[0], expected[0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-7, atol=1e-8)
    autokern.disable()
    torch.testing.assert_close(loss_of(mll).detach(), expected[0], rtol=1e-7, atol=1e-7)
    autokern.enable()


class Deep(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.network = torch.nn.Sequential(torch.nn.Linear(D, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        self.mean_module, self.covar_module = ConstantMean(), kernel

    def forward(self, x):
        features = self.network(x)
        return gpytorch.distributions.MultivariateNormal(self.mean_module(features), self.covar_module(features))


DEEP = {
    "rbf": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "matern52": lambda: ScaleKernel(MaternKernel(2.5)),
    "matern12": lambda: MaternKernel(0.5, ard_num_dims=2),
    "rq": lambda: RQKernel(active_dims=[1]) + ConstantKernel(),
    "periodic": lambda: ScaleKernel(PeriodicKernel(ard_num_dims=2)),
    "product": lambda: ProductKernel(RBFKernel(active_dims=[0]), MaternKernel(1.5, active_dims=[1, 1])),
    "linear": lambda: ScaleKernel(RBFKernel()) + LinearKernel(),
    "polynomial": lambda: PolynomialKernel(2) + RBFKernel(active_dims=[1]),
    "spectral mixture": lambda: SpectralMixtureKernel(3, ard_num_dims=2),
}


@pytest.mark.parametrize("n", [2, 12, 40])
@pytest.mark.parametrize("kernel", DEEP.values(), ids=DEEP.keys())
def test_points_that_a_network_makes(kernel, n, served):
    torch.manual_seed(n)
    generator = torch.Generator().manual_seed(n)
    x = torch.rand(n, D, generator=generator, dtype=torch.float64)
    likelihood = GaussianLikelihood()
    model = Deep(x, x.sum(-1).cos(), likelihood, kernel()).double()
    mll = ExactMarginalLogLikelihood(likelihood, model).train()
    with by("arrays"):
        found = derivatives(mll)
        loss_of(mll).backward()
    assert served["arrays"] == 2
    k = dense(model.covar_module, model.network(x)) + likelihood.noise * torch.eye(n, dtype=x.dtype)
    loss = -torch.distributions.MultivariateNormal(model.mean_module(x), k).log_prob(model.train_targets) / n
    parameters = list(mll.parameters())
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    second = torch.autograd.grad(sum((g * (k + 1)).sum() for k, g in enumerate(first)), parameters)
    torch.testing.assert_close(found[0], loss.detach(), rtol=1e-11, atol=1e-11)
    for one, other, p in zip(found[1], first, parameters, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(p.grad, one, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[2], second, rtol=1e-6, atol=1e-8)


def test_points_that_meet_have_gradients():
    x = torch.rand(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[1] = x[0]
    x[3] = x[2] + 1e-8
    likelihood = GaussianLikelihood().double()
    for base in (MaternKernel(0.5), MaternKernel(1.5), RBFKernel(), RQKernel()):
        kernel = ScaleKernel(base).double()
        points, others = x.clone().requires_grad_(), x.clone().requires_grad_()
        with by("arrays"):
            likelihood(gpytorch.distributions.MultivariateNormal(x.sum(-1), kernel(points))).log_prob(
                x[:, 0]
            ).backward()
        k = dense(kernel, others) + likelihood.noise * torch.eye(6, dtype=x.dtype)
        torch.distributions.MultivariateNormal(x.sum(-1), k).log_prob(x[:, 0]).backward()
        torch.testing.assert_close(points.grad, others.grad, rtol=1e-9, atol=1e-9)


def test_a_kernel_that_is_no_tree_and_no_factor(served):
    """What the library says of it is not of trees."""
    mll = made(LinearKernel(), likelihood=FixedNoiseGaussianLikelihood(torch.full((N,), 1e-4, dtype=torch.float64)))
    mll.likelihood.noise_covar.noise = torch.full((N,), -2.0, dtype=torch.float64)
    with by("arrays"), pytest.raises(Exception, match=r"not positive definite|not p\.d\."), pytest.warns():
        loss_of(mll)
    assert served["arrays"] == 0


def test_noise_that_is_known(served):
    mll = made(RBFKernel(), likelihood=FixedNoiseGaussianLikelihood(torch.linspace(0.1, 0.4, N, dtype=torch.float64)))
    with by("fused"):
        expected = derivatives(mll)
    with by("arrays"):
        found = derivatives(mll)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


B = torch.Size([3])
BATCHES = {
    "all": lambda: made(ScaleKernel(RBFKernel(batch_shape=B, ard_num_dims=D), batch_shape=B), batch=B),
    "a sum": lambda: made(RBFKernel(batch_shape=B) + MaternKernel(2.5, batch_shape=B, active_dims=[1]), batch=B),
    "common noise": lambda: made(MaternKernel(1.5, batch_shape=B), likelihood=GaussianLikelihood(), batch=B),
    "common mean": lambda: made(RBFKernel(batch_shape=B), mean=LinearMean(D), batch=B),
    "common targets": lambda: made(RBFKernel(batch_shape=B), likelihood=GaussianLikelihood(batch_shape=B)),
    "known noise": lambda: made(
        RBFKernel(batch_shape=B), likelihood=FixedNoiseGaussianLikelihood(torch.full((*B, N), 0.1).double()), batch=B
    ),
    "a batch of one": lambda: made(RBFKernel(batch_shape=torch.Size([1])), batch=(1,)),
    "two dimensions": lambda: made(RBFKernel(batch_shape=torch.Size([2, 2])), batch=(2, 2)),
    "one point": lambda: made(RBFKernel(batch_shape=B), batch=B, n=1),
}


SQUARE = {"n": 3, "batch": B}
BATCHES |= {
    "as many points as models": lambda: made(RBFKernel(batch_shape=B, ard_num_dims=D), **SQUARE),
    "common noise of as many": lambda: made(RBFKernel(batch_shape=B), likelihood=GaussianLikelihood(), **SQUARE),
    "known noise of as many": lambda: made(
        RBFKernel(batch_shape=B),
        likelihood=FixedNoiseGaussianLikelihood(torch.linspace(0.1, 0.9, 9).double().view(3, 3)),
        **SQUARE,
    ),
    "known and further noise": lambda: made(
        RBFKernel(batch_shape=B),
        likelihood=FixedNoiseGaussianLikelihood(
            torch.linspace(0.1, 0.9, 3 * N).double().view(3, N), learn_additional_noise=True, batch_shape=B
        ),
        batch=B,
    ),
    "classes": lambda: made(RBFKernel(batch_shape=B), likelihood=classes(), batch=B),
}


def classes():
    return DirichletClassificationLikelihood(torch.arange(N) % 3, dtype=torch.float64)


@pytest.mark.parametrize("points", ["common", "own"])
@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES.keys())
def test_batches(make, points, served):
    mll = make()
    if points == "own":
        x, batch = mll.model.train_inputs[0], mll.model.covar_module.batch_shape
        mll.model.set_train_data(
            torch.stack([x + k for k in range(batch.numel())]).view(*batch, *x.shape), strict=False
        )
    with by("fused"):
        expected = derivatives(mll)
    with by("arrays"):
        found = derivatives(mll)
        mll.zero_grad()
        losses = loss_of(mll)
        (losses * torch.linspace(1, 2, losses.numel(), dtype=losses.dtype).view(losses.shape)).sum().backward()
    assert served["arrays"] == 2 * (mll.model.train_inputs[0].shape[-2] > 1)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close([p.grad for p in mll.parameters()], expected[1], rtol=1e-8, atol=1e-9)


def test_batches_that_share_a_kernel_are_fused(served):
    mll = made(RBFKernel(), batch=B)
    with by("arrays"):
        found = loss_of(mll)
    with by("stock"):
        torch.testing.assert_close(found, loss_of(mll))
    assert served["arrays"] == 0


@pytest.mark.parametrize("n", [2, 12, 150])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_single_precision_is_rounded_at_the_end(kernel, n, served):
    torch.manual_seed(0)
    mll = made(kernel(), n=n, dtype=torch.float32)
    found = {}
    for name in ("stock", "arrays"):
        mll.zero_grad()
        with by(name):
            loss = loss_of(mll)
            loss.backward()
        found[name] = [loss.detach(), *(p.grad.clone() for p in mll.parameters())]
    assert served["arrays"] == 1
    mll.double().zero_grad()
    with by("stock"):
        exact = loss_of(mll)
        exact.backward()
    for one, other, truth in zip(
        found["arrays"], found["stock"], [exact.detach(), *(p.grad for p in mll.parameters())], strict=True
    ):
        assert one.dtype is torch.float32
        assert (one - truth).abs().max() <= (other - truth).abs().max() + 1e-5 * (truth.abs().max() + 0.01)


def test_second_derivatives_in_single_precision(served):
    mll = made(RBFKernel(ard_num_dims=D), dtype=torch.float32)
    with by("arrays"):
        found = derivatives(mll)
    mll.double()
    with by("fused"):
        expected = derivatives(mll)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, check_dtype=False)
    assert served["arrays"] == 1


def test_a_kernel_that_changes_its_precision(served):
    mll = made(RBFKernel())
    for change in (mll.float, mll.double, mll.float):
        change()
        with by("arrays"):
            found = loss_of(mll)
        with by("fused"):
            torch.testing.assert_close(found, loss_of(mll), rtol=1e-5, atol=1e-5)
    assert served["arrays"] == 3


def test_a_list_of_models(served):
    models = [made(RBFKernel()).model, made(MaternKernel(2.5), n=9).model]
    listed = gpytorch.models.IndependentModelList(*models)
    mll = gpytorch.mlls.SumMarginalLogLikelihood(listed.likelihood, listed).train()

    def derived():
        mll.zero_grad()
        loss = -mll(listed(*listed.train_inputs), listed.train_targets)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in mll.parameters())]

    with by("fused"):
        expected = derived()
    with by("arrays"):
        found = derived()
    assert served["arrays"] == 2
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11)


def test_a_prior_alone(served):
    mll = made(RBFKernel())
    mll.model.likelihood(mll.model(*mll.model.train_inputs))
    prior = mll.model(*mll.model.train_inputs)
    value = mll.model.train_targets.clone().requires_grad_()
    noisy = mll.likelihood(prior)
    with by("arrays"):
        noisy.log_prob(value).backward()
    expected = torch.linalg.solve(noisy.covariance_matrix, value - noisy.mean)
    torch.testing.assert_close(value.grad, -expected.detach(), rtol=1e-8, atol=1e-10)
    assert served["arrays"] == 1


def test_backward_again_and_batches_of_cotangents(served):
    mll = made(RBFKernel())
    parameters = list(mll.parameters())
    with by("arrays"):
        loss = loss_of(mll)
    once = torch.autograd.grad(loss, parameters, retain_graph=True)
    twice = torch.autograd.grad(loss, parameters, retain_graph=True)
    torch.testing.assert_close(once, twice, rtol=0, atol=0)
    cotangents = torch.tensor([1.0, -2.0], dtype=torch.float64)
    batched = torch.autograd.grad(loss, parameters, cotangents, is_grads_batched=True)
    for one, many in zip(once, batched, strict=True):
        torch.testing.assert_close(many, torch.stack([one, -2 * one]))
    assert served["arrays"] == 1


def test_a_second_backward_raises_and_frees(served):
    mll = made(RBFKernel())
    with by("arrays"):
        loss = loss_of(mll)
    mean = mll.model.mean_module.raw_constant
    torch.autograd.grad(loss, mean, retain_graph=True)
    torch.autograd.grad(loss, mean)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, mean)
    assert served["arrays"] == 1


def test_what_is_unknown_is_fused(served):
    for kernel in (
        PiecewisePolynomialKernel(0, ard_num_dims=D),
        type("Own", (RBFKernel,), {})(),
    ):
        mll = made(kernel)
        with by("arrays"):
            first = loss_of(mll)
        autokern.disable()
        torch.testing.assert_close(first, loss_of(mll), rtol=1e-10, atol=1e-10)
        autokern.enable()
    assert served["arrays"] == 0


def test_a_kernel_that_changes_is_read_again(served):
    mll = made(MaternKernel(2.5))
    kernel = mll.model.covar_module
    changes = [
        lambda: setattr(kernel.raw_lengthscale, "data", kernel.raw_lengthscale.data + 1),
        lambda: kernel.raw_lengthscale.data.mul_(0.5),
        lambda: setattr(kernel, "nu", 1.5),
        lambda: kernel.register_constraint("raw_lengthscale", Interval(0.1, 2.0)),
        lambda: setattr(kernel, "raw_lengthscale", torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))),
        lambda: kernel.raw_lengthscale.requires_grad_(False),
    ]
    for change in changes:
        change()
        with by("arrays"):
            found = loss_of(mll)
        with by("fused"):
            torch.testing.assert_close(found, loss_of(mll), rtol=1e-11, atol=1e-11)
    assert served["arrays"] == len(changes)


def test_a_change_between_forward_and_backward():
    mll = made(RBFKernel())
    with by("arrays"):
        loss = loss_of(mll)
    mll.model.train_inputs[0].data.add_(1.0)
    mll.model.train_targets.add_(1.0)
    loss.backward(retain_graph=True)  # the derivatives are those of the call
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, list(mll.parameters()), create_graph=True)
    with torch.no_grad():
        mll.model.covar_module.raw_lengthscale.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_factor_means_the_librarys_own_words(served):
    mll = made(RBFKernel(), likelihood=FixedNoiseGaussianLikelihood(torch.full((N,), 1e-4, dtype=torch.float64)))
    mll.likelihood.noise_covar.noise = torch.full((N,), -2.0, dtype=torch.float64)
    with by("arrays"), pytest.raises(Exception, match=r"not positive definite|not p\.d\."), pytest.warns():
        loss_of(mll)
    assert served["arrays"] == 0


def test_threads_that_share_a_kernel():
    mll = made(ScaleKernel(RBFKernel(ard_num_dims=D)), n=60)
    with by("arrays"):
        expected = loss_of(mll).item()
    found = []

    def work():
        with by("arrays"):
            found.extend(loss_of(mll).item() for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 60


def test_kernels_are_freed():
    refs = []
    for _ in range(5):
        mll = made(ScaleKernel(MaternKernel(2.5)))
        with by("arrays"):
            loss_of(mll).backward()
        refs.append(weakref.ref(mll.model.covar_module))
        del mll
    gc.collect()
    assert [ref() for ref in refs] == [None] * 5
