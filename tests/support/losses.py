"""Marginal likelihoods that are recorded and replayed, exact and variational: their training beside the library's."""

import functools

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import (
    DeepApproximateMLL,
    DeepPredictiveLogLikelihood,
    ExactMarginalLogLikelihood,
    VariationalELBO,
)
from gpytorch.models.deep_gps import DeepGP, DeepGPLayer
from gpytorch.models.deep_gps.dspp import DSPP, DSPPLayer
from gpytorch.priors import GammaPrior
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    DeltaVariationalDistribution,
    OrthogonallyDecoupledVariationalStrategy,
    VariationalStrategy,
)
from support.outcomes import judged

import autokern
from autokern.hooks import install

DOUBLE = torch.float64


class Own(Kernel):
    """A kernel of the user's: the library's RBF to a power."""

    has_lengthscale = True

    def __init__(self, **options):
        super().__init__(**options)
        self.register_parameter("raw_power", torch.nn.Parameter(torch.zeros(1)))
        self.register_constraint("raw_power", gpytorch.constraints.Positive())

    def forward(self, x1, x2, diag=False, **params):
        power = self.raw_power_constraint.transform(self.raw_power)
        distance = self.covar_dist(x1 / self.lengthscale, x2 / self.lengthscale, diag=diag, square_dist=True)
        return torch.exp(-0.5 * distance).pow(power)


class Unread(RBFKernel):
    """A subclass, whose models `autokern.ops.variational` does not compute from points: their steps are recorded."""


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel, mean, kind=MultivariateNormal, features=None):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module, self.kind, self.features = mean, kernel, kind, features

    def forward(self, x):
        x = x if self.features is None else self.features(x)
        return self.kind(self.mean_module(x), self.covar_module(x))


def independent(mean, covariance):
    """Tasks as a batch of distributions, for a `Model` of this kind."""
    return MultitaskMultivariateNormal.from_batch_mvn(MultivariateNormal(mean, covariance))


def points(n=12, d=2, dtype=DOUBLE):
    return torch.rand(n, d, dtype=dtype, generator=torch.Generator().manual_seed(3))


def single(kernel=None, mean=None, dtype=DOUBLE, likelihood=None, kind=ExactMarginalLogLikelihood, features=None):
    x = points(dtype=dtype)
    y = (5 * x).sin().sum(-1)
    torch.manual_seed(0)
    likelihood = likelihood or GaussianLikelihood(noise_prior=GammaPrior(2.0, 5.0))
    model = Model(x, y, likelihood, kernel or ScaleKernel(Own()), mean or ConstantMean(), features=features).to(dtype)
    return kind(model.likelihood, model)


def noisy(n=12):
    """With so many levels of noise that are known."""
    return single(likelihood=FixedNoiseGaussianLikelihood(torch.full((n,), 0.05, dtype=DOUBLE)))


MANY = torch.rand(90, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(5))


class Sparse(gpytorch.models.ApproximateGP):
    def __init__(self, strategy=VariationalStrategy, kind=CholeskyVariationalDistribution, learn=True, mean=None):
        inducing = MANY[:8].clone()
        super().__init__(strategy(self, inducing, kind(len(inducing)), learn_inducing_locations=learn))
        self.mean_module, self.covar_module = (mean or ConstantMean)(), ScaleKernel(Unread(ard_num_dims=2))

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Decoupled(Sparse):
    """A model whose mean has more inducing points than its covariance; it interpolates between both sets."""

    def __init__(self):
        super().__init__()
        outer = DeltaVariationalDistribution(12)
        self.variational_strategy = OrthogonallyDecoupledVariationalStrategy(
            self.variational_strategy, MANY[20:32].clone(), outer
        )


def sparse(likelihood=None, mll=VariationalELBO, model=Sparse, **options):
    torch.manual_seed(1)
    made = model(**options).double()
    return mll((likelihood or GaussianLikelihood()).double(), made, num_data=len(MANY)).train()


class Poisson(Likelihood):
    """Its expectation is drawn."""

    def forward(self, function_samples, **kwargs):
        return torch.distributions.Poisson(function_samples.exp(), validate_args=False)


class Layer:
    """A layer of a deep model, with inducing points of its own for each output."""

    def __init__(self, d, outputs, *sites):
        many = torch.Size([] if outputs is None else [outputs])
        inducing = torch.rand(*many, 6, d, dtype=DOUBLE)
        variational = CholeskyVariationalDistribution(6, batch_shape=many)
        super().__init__(VariationalStrategy(self, inducing, variational), d, outputs, *sites)
        self.mean_module, kernel = ConstantMean(batch_shape=many), Unread(ard_num_dims=d, batch_shape=many)
        self.covar_module = ScaleKernel(kernel, batch_shape=many)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class DrawnLayer(Layer, DeepGPLayer):
    pass


class SitesLayer(Layer, DSPPLayer):
    pass


class Deep(DeepGP):
    """A model of two layers; the values of the first are drawn."""

    def __init__(self, layer=DrawnLayer, *sites, outputs=None):
        super().__init__(*sites)
        self.hidden, self.last = layer(2, 2, *sites), layer(2, outputs, *sites)

    def forward(self, x):
        return self.last(self.hidden(x))


class Sites(Deep, DSPP):
    """The same with values at quadrature sites."""


def deep(likelihood=None, model=Deep, **options):
    return DeepApproximateMLL(sparse(likelihood, model=model, **options))


def sites():
    return sparse(mll=DeepPredictiveLogLikelihood, model=functools.partial(Sites, SitesLayer, 3))


def batch(mll, at, size=30):
    """All data of an exact model, and a draw of those of a variational one."""
    if isinstance(mll.model, gpytorch.models.ExactGP):
        return mll.model.train_inputs, mll.model.train_targets
    rows = torch.randperm(len(MANY), generator=torch.Generator().manual_seed(at))[:size]
    return (MANY[rows],), (6 * MANY[rows]).sin().sum(-1)


def replays():
    return autokern.stats().get("optimised function", {}).get("replay", 0)


def called(mll, at=0):
    """A loss, and the distribution that it is of."""
    inputs, target = batch(mll, at)
    output = mll.model(*inputs)
    return mll(output, target), output


def prepared(make=single):
    """A marginal likelihood of which the next call is a replay."""
    mll = make()
    for at in range(7):
        called(mll, at)[0].backward()
    mll.zero_grad()
    return mll


def once(change, when=7):
    """A change of a marginal likelihood at one step of its training."""
    return lambda mll, at: change(mll) if at == when else None


def trained(make, change=None, steps=14, size=lambda at: 30, inside=False):
    """Losses and gradients of some steps of training, and the parameters after them.

    What changes does so before the model's call, or after it with `inside`.
    """
    torch.manual_seed(0)
    mll, found = make(), []
    optimizer = torch.optim.Adam(mll.parameters(), lr=0.05)
    for at in range(steps):
        if change is not None and not inside:
            change(mll, at)
        inputs, target = batch(mll, at, size(at))
        optimizer.zero_grad()
        output = mll.model(*inputs)
        if change is not None and inside:
            change(mll, at)
        loss = -mll(output, target)
        loss.backward()
        optimizer.step()
        found += [loss.detach(), *(p.grad.clone() for p in mll.parameters() if p.grad is not None)]
        if hasattr(mll.model, "variational_strategy"):  # of what the model's call has left, and of the new parameters
            found.append(mll.model.variational_strategy.kl_divergence().detach())
    return [*found, *(t.detach() for t in (*mll.parameters(), *mll.buffers()))]


def same(ours, theirs, bound=1e-9):
    for one, other in zip(ours, theirs, strict=True):
        rtol = bound if other.dtype == DOUBLE else 1e-5
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


def as_library(served=0, bound=1e-9):
    """Let a test return the same with replays, at least so many of them, as by the library."""

    def judge(run, _):
        theirs, before = run(), replays()
        with install.enabled():
            ours = run()
        assert replays() - before >= served
        same(ours, theirs, bound)

    return judged(judge)


def each_kind(test):
    return pytest.mark.parametrize("make", [single, sparse], ids=["exact", "variational"])(test)
