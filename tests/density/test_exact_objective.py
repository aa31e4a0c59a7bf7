"""A model read once computes what the libraries compute, and is read again, or left alone, when it changes."""

from __future__ import annotations

import copy
import functools
import math

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan, Positive
from gpytorch.kernels import (
    AdditiveKernel,
    MaternKernel,
    PiecewisePolynomialKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean, ConstantMeanGrad
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from gpytorch.priors import GammaPrior, HalfCauchyPrior, NormalPrior
from torch.distributions import Gamma

from autokern.density.exact_objective import Reading
from autokern.model.arrays import UnreadError

D = 4


def read(mll):
    """The reading of a model, None where it is not exactly known."""
    try:
        made = Reading(mll)
    except UnreadError:
        return None
    return made if made.holds() else None


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, mean, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = mean, kernel

    def forward(self, x):
        mean_x = self.mean_module(x)
        covar_x = self.covar_module(x)
        return gpytorch.distributions.MultivariateNormal(mean_x, covar_x)


def made(kernel=None, mean=None, likelihood=None, n=13, kind=Model):
    generator = torch.Generator().manual_seed(n)
    x = torch.rand(n, D, generator=generator, dtype=torch.float64)
    y = x.sum(-1).sin() + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    kernel, mean, likelihood = (
        kernel or RBFKernel(ard_num_dims=D),
        mean or ConstantMean(),
        likelihood or GaussianLikelihood(),
    )
    model = kind(x, y, likelihood, mean, kernel).double()
    mll = ExactMarginalLogLikelihood(likelihood, model).train()
    for p in mll.parameters():
        with torch.no_grad():
            p.add_(0.3 * torch.rand(p.shape, generator=generator, dtype=torch.float64))
    return mll


def stock(mll):
    mll.zero_grad()
    loss = -mll(mll.model(*mll.model.train_inputs), mll.model.train_targets)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in mll.named_parameters() if p.requires_grad}


def ours(reading, mll):
    mll.zero_grad()
    parameters = {name: p for name, p in mll.named_parameters() if p.requires_grad}
    assert reading.covers(parameters)
    loss, grads = reading.evaluate(parameters)
    return loss.item(), dict(zip(parameters, grads, strict=True))


def agree(mll, reading=None, digits=1.0):
    reading = reading or Reading(mll)
    assert reading.holds()
    expected, slopes = stock(mll)
    found, grads = ours(reading, mll)
    assert math.isclose(found, expected, rel_tol=1e-12 * digits, abs_tol=1e-12 * digits)
    scale = max(g.abs().max() for g in slopes.values())
    for name, grad in grads.items():
        torch.testing.assert_close(
            grad,
            slopes[name],
            rtol=1e-9 * digits,
            atol=float(1e-11 * scale * digits),
            msg=lambda m, n=name: f"{n}: {m}",
        )
    return reading


def test_noise():
    agree(made(likelihood=GaussianLikelihood(noise_prior=GammaPrior(1.1, 0.05))))
    agree(made(likelihood=GaussianLikelihood(noise_constraint=GreaterThan(1e-4, transform=None, initial_value=0.1))))
    given = torch.linspace(0.1, 0.3, 13, dtype=torch.float64)
    agree(made(likelihood=FixedNoiseGaussianLikelihood(given)))
    learned = {"learn_additional_noise": True, "noise_prior": GammaPrior(1.1, 0.05)}
    agree(made(likelihood=FixedNoiseGaussianLikelihood(given, **learned)))


class Spelt(Model):
    def forward(self, points):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(points), self.covar_module(points))


class Renamed(Model):
    def __init__(self, x, y, likelihood, mean, kernel):
        super(Model, self).__init__(x, y, likelihood)
        self.average, self.kernel = mean, kernel

    def forward(self, z):
        m = self.average(z)
        k = self.kernel(z)
        return gpytorch.distributions.MultivariateNormal(m, k)


@pytest.mark.parametrize("kind", [Spelt, Renamed])
def test_ways_to_write_the_plain_forward(kind):
    agree(made(kind=kind))


class Doubled(Model):
    def forward(self, x):
        mean_x = self.mean_module(x)
        covar_x = self.covar_module(x)
        return gpytorch.distributions.MultivariateNormal(mean_x, covar_x + covar_x)


class Shifted(Model):
    def forward(self, x):
        mean_x = self.mean_module(x)
        covar_x = self.covar_module(x)
        return gpytorch.distributions.MultivariateNormal(covar_x, mean_x)


class Called(Model):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


class Hidden(Model):
    @property
    def covar_module(self):
        return RBFKernel().double()

    @covar_module.setter
    def covar_module(self, kernel):
        self._modules["covar_module"] = kernel


class OwnTargets(Model):
    @property
    def train_targets(self):
        return 2 * self._train_targets

    @train_targets.setter
    def train_targets(self, value):
        self._train_targets = value


class Added(Model):
    def added_loss_terms(self):
        yield from ()


def constant_of(mll, n):
    mll.model.mean_module.raw_constant = torch.nn.Parameter(torch.zeros(n, dtype=torch.float64))
    return mll


class OwnKernel(RBFKernel):
    pass


UNKNOWN = {
    "another forward": lambda: made(kind=Doubled),
    "modules in each other's place": lambda: made(kind=Shifted),
    "a call of its own": lambda: made(kind=Called),
    "a property": lambda: made(kind=Hidden),
    "a subclass of a kernel": lambda: made(OwnKernel()),
    "another kernel": lambda: made(PiecewisePolynomialKernel(0, ard_num_dims=D)),
    "other targets": lambda: made(kind=OwnTargets),
    "added losses": lambda: made(kind=Added),
    "dimensions from the end": lambda: made(RBFKernel(active_dims=[-1])),
    "a constant for each point": lambda: constant_of(made(), 13),
    "noise that wants a gradient": lambda: made(
        likelihood=FixedNoiseGaussianLikelihood(torch.full((13,), 0.1, dtype=torch.float64).requires_grad_())
    ),
    "a batch of kernels": lambda: made(RBFKernel(batch_shape=torch.Size([2]))),
    "another mean": lambda: made(mean=ConstantMeanGrad()),
    "another prior": lambda: made(RBFKernel(lengthscale_prior=HalfCauchyPrior(1.0))),
}


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_what_is_not_exactly_known_is_not_read(make):
    assert read(make()) is None


def test_more_that_is_not_read():
    mll = made(RBFKernel())
    mll.model.covar_module.register_prior("own", NormalPrior(0.0, 1.0), lambda m: m.lengthscale.log())
    assert read(mll) is None
    shared = RBFKernel()
    assert read(made(AdditiveKernel(shared, ScaleKernel(shared)))) is None
    mll = made()
    assert read(LeaveOneOutPseudoLikelihood(mll.likelihood, mll.model)) is None
    assert read(ExactMarginalLogLikelihood(GaussianLikelihood().double(), mll.model)) is None
    mll.model.covar_module.forward = mll.model.covar_module.forward
    assert read(mll) is None
    mll = made()
    mll.model.extra = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    assert read(mll) is None
    mll = made()
    mll.model.set_train_data(mll.model.train_inputs[0].clone().requires_grad_(), strict=False)
    assert read(mll) is None


CHANGES = {
    "other points in place": lambda m: m.train_inputs[0].data.mul_(1.1),
    "evaluation mode": lambda m: m.eval(),
    "active dimensions": lambda m: setattr(m.covar_module, "active_dims", torch.tensor([0, 1])),
    "a module": lambda m: setattr(m, "more", RBFKernel()),
    "a hook after a gradient": lambda m: m.covar_module.raw_lengthscale.register_post_accumulate_grad_hook(print),
    "a forward of the model": lambda m: setattr(m, "forward", lambda x: None),
    "active dimensions in place": lambda m: m.more.kernels[0].active_dims.copy_(torch.tensor([1])),
    "a transform": lambda m: setattr(m.covar_module.raw_lengthscale_constraint, "transform", torch.exp),
    "distances": lambda m: setattr(m.covar_module, "covar_dist", None),
    "another class": lambda m: setattr(m.covar_module, "__class__", OwnKernel),
    "points that want gradients": lambda m: m.train_inputs[0].requires_grad_(),
    "an attribute in front": lambda m: m.__dict__.update(covar_module=RBFKernel()),
    "a likelihood's call": lambda m: setattr(m.likelihood, "marginal", lambda *args: None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_model_that_changes_is_seen(change):
    kernel = MaternKernel(2.5, ard_num_dims=D)
    mll = made(kernel)
    if "in place" in change_name(change):
        mll = made(AdditiveKernel(RBFKernel(active_dims=[0]), kernel))
        mll.model.__dict__["_modules"]["more"] = mll.model.covar_module
    reading = Reading(mll)
    assert reading.holds()
    change(mll.model)
    assert not reading.holds()


def test_a_curve_that_changes_is_seen():
    for change in (lambda curve: setattr(curve, "beta", 2), lambda curve: curve.register_forward_hook(print)):
        curve = torch.nn.Softplus()  # the library's own is shared by all models
        mll = made(RBFKernel(lengthscale_constraint=Positive(transform=curve)))
        reading = Reading(mll)
        assert reading.holds()
        change(curve)
        assert not reading.holds()


def change_name(change):
    return next(name for name, one in CHANGES.items() if one is change)


def test_classes_that_are_patched_are_seen(monkeypatch):
    for kind, name in ((RBFKernel, "forward"), (ConstantMean, "forward"), (GreaterThan, "transform")):
        mll, stock = made(), getattr(kind, name)
        reading = Reading(mll)

        @functools.wraps(stock)
        def patched(*args, stock=stock, **kwargs):
            return stock(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(kind, name, patched)
            assert not reading.holds()
            assert read(made()) is None
        assert reading.holds()


@pytest.mark.parametrize(
    ("kind", "name"), [(Model, "__call__"), (Model, "transform_inputs"), (RBFKernel, "__call__"), (Gamma, "log_prob")]
)
def test_functions_that_classes_get_later_are_seen(kind, name, monkeypatch):
    mll = made(RBFKernel(lengthscale_prior=GammaPrior(3.0, 6.0)))
    reading = Reading(mll)
    assert reading.holds()
    monkeypatch.setattr(kind, name, lambda *args, **kwargs: None, raising=False)
    assert not reading.holds()


def test_what_changes_in_place_is_computed_with():
    mll = made(RBFKernel(lengthscale_constraint=GreaterThan(0.1), lengthscale_prior=NormalPrior(1.0, 0.5)))
    reading = Reading(mll)
    model = mll.model
    with torch.no_grad():
        model.train_targets.add_(1.0)
        model.covar_module.raw_lengthscale_constraint.lower_bound.fill_(0.2)
        model.covar_module.lengthscale_prior.loc.fill_(2.0)
        mll.likelihood.noise = 0.5
    mll.load_state_dict(copy.deepcopy(mll.state_dict()))
    agree(mll, reading)


def test_infinite_inputs_warn_as_little_as_stock():
    """Warnings are errors here."""
    x = torch.rand(8, 2, dtype=torch.float64)
    x[3, 0] = math.inf
    likelihood = GaussianLikelihood()
    model = Model(x, x[:, 1], likelihood, ConstantMean(), RBFKernel()).double()
    Reading(ExactMarginalLogLikelihood(likelihood, model).train())
