"""A model read once computes what the libraries compute, and is read again, or left alone, when it changes."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan
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
from support.readings import D, Model, made, read
from torch.distributions import Gamma

from autokern.density.exact_objective import Reading


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


def change_name(change):
    return next(name for name, one in CHANGES.items() if one is change)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((Model, name) for name in ("__call__", "transform_inputs")),
        *((RBFKernel, name) for name in ("__call__", "forward")),
        *((ConstantMean, "forward"), (GreaterThan, "transform"), (Gamma, "log_prob")),
    ],
)
def test_functions_of_classes_that_are_patched_or_come_later_are_seen(kind, name, monkeypatch):
    mll = made(RBFKernel(lengthscale_prior=GammaPrior(3.0, 6.0)))
    reading = Reading(mll)
    assert reading.holds()
    monkeypatch.setattr(kind, name, lambda *args, **kwargs: None, raising=False)
    assert not reading.holds()
