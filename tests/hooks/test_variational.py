"""Replayed training steps of variational models: what they hold, draw and count, beside the library's."""

import contextlib
import functools

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import VariationalELBO
from support.losses import (
    DOUBLE,
    Deep,
    Poisson,
    Sparse,
    as_library,
    batch,
    called,
    deep,
    once,
    prepared,
    replays,
    sparse,
    trained,
)

from autokern.core.replay import left
from autokern.hooks import gpytorch as hooks
from autokern.hooks import install
from autokern.hooks.later import variational

pytestmark = pytest.mark.usefixtures("at_once")


@as_library(served=4)
def test_batches_of_another_size_are_left_to_the_library():
    return trained(sparse, size=lambda at: 30 if at % 3 else 17)


@as_library()
def test_other_uses_of_a_distribution_are_the_library_s():
    """Other terms of a loss, two calls before two losses, a loss that is computed twice, another distribution."""
    mll = prepared(sparse)
    parameters, ((x,), y) = list(mll.parameters()), batch(mll, 20)

    def shifted(of):
        return MultivariateNormal(of.mean + 1, of.lazy_covariance_matrix)

    def slopes(loss, *moved):
        value = loss(*(mll.model(x + by) for by in moved))
        return [value, *torch.autograd.grad(value, parameters)]

    return [
        *slopes(lambda one: -mll(one, y) + 0.1 * one.variance.sum() + one.mean.square().sum(), 0),
        *slopes(lambda one, other: mll(one, y) + 3 * mll(other, y), 0, 0.1),
        *slopes(lambda one: mll(one, y) + mll(one, 2 * y), 0),
        *slopes(lambda one: mll(shifted(one), y), 0),
    ]


@as_library(bound=1e-7)
def test_second_derivatives_of_other_uses_are_the_library_s():
    """Their cotangents depend on the distribution, so a first pass that follows them does not end."""
    mll = prepared(sparse)
    parameters = list(mll.model.parameters())
    output = mll.model(*batch(mll, 20)[0])
    options = {"allow_unused": True, "materialize_grads": True}
    slopes = torch.autograd.grad(output.variance.square().sum(), parameters, create_graph=True, **options)
    return [*slopes, *torch.autograd.grad(sum(s.square().sum() for s in slopes), parameters, **options)]


@as_library(served=4, bound=1e-6)
def test_what_is_written_to_parameters_after_a_models_call_counts():
    return trained(sparse, once(lambda mll: [p.data.mul_(1.01) for p in mll.parameters()]), inside=True)


PARTS = {
    "mean": lambda output: output.loc.data.add_(1.0),
    "hook": lambda output: output.lazy_covariance_matrix.representation()[-1].register_hook(lambda slope: 2 * slope),
}


@pytest.mark.parametrize("part", PARTS)
@as_library()
def test_a_distribution_that_was_written_past_its_version_counters_or_has_hooks_counts(part):
    mll = prepared(sparse)
    (x,), y = batch(mll, 20)
    output = mll.model(x)
    PARTS[part](output)
    loss = mll(output, y)
    return [loss, *torch.autograd.grad(loss, list(mll.parameters()))]


@as_library(served=4)
def test_parameters_that_are_parts_of_one_vector_are_read_in_place():
    def of_one_vector():
        mll = sparse()
        vector = torch.nn.utils.parameters_to_vector(mll.parameters()).detach()
        torch.nn.utils.vector_to_parameters(vector, mll.parameters())
        return mll

    return trained(of_one_vector)


@as_library(served=1)
def test_parameters_that_share_their_memory_may_be_parted():
    def tied():
        mll = sparse()
        mll.model.mean_module.raw_constant.data = mll.model.covar_module.raw_outputscale.data
        return mll

    def part(mll):
        mll.model.mean_module.raw_constant.data = torch.tensor(0.7, dtype=DOUBLE)

    return trained(tied, once(part))


def test_parameters_of_replays_can_be_swapped():
    with install.enabled():
        mll = prepared(sparse)
        called(mll, 20)[0].backward()
        for p in mll.parameters():
            torch.utils.swap_tensors(p, torch.nn.Parameter(p.detach().clone()))


def test_steps_that_use_the_divergence_otherwise_are_soon_the_library_s():
    with install.enabled():
        mll = prepared(sparse)
        ((x,), y), before = batch(mll, 20), replays()
        for _ in range(20):
            loss = mll(mll.model(x), y)
            (mll.model.variational_strategy.kl_divergence() - loss).backward()
        assert replays() - before <= 9


class Metaclass(type):
    """With Pyro installed, GPyTorch's distributions, which strategies cache, have one of its own."""


class WithMetaclass(metaclass=Metaclass):
    pass


def test_classes_with_any_metaclass_are_kept_by_reference():
    assert left._Form([WithMetaclass], frozenset()).again([], iter(()), id) == [WithMetaclass]


def test_a_step_that_cannot_be_recorded_leaves_the_caches_of_the_models_call(monkeypatch):
    monkeypatch.setattr(left, "is_library", lambda name: False)  # no distribution can be recreated
    with install.enabled():
        mll = sparse()
        for at in range(4):
            (x,), y = batch(mll, at)
            output = mll.model(x)
            cached = dict(mll.model.variational_strategy._memoize_cache)
            mll(output, y).backward()
            after = mll.model.variational_strategy._memoize_cache
            assert cached
            assert all(after[key] is value for key, value in cached.items())


CALLS = []


class Counting(Sparse):
    def forward(self, x):
        CALLS.append(1)
        return super().forward(x)


class Noisy(Sparse):
    def forward(self, x):
        return super().forward(x + 0.01 * torch.randn_like(x))


class Drawing(ConstantMean):
    """A mean that draws from generators of the user's own."""

    def forward(self, x):
        numbers = sum(torch.randn(x.shape[:-1], generator=one, dtype=DOUBLE) for one in OWN_DRAWS)
        return ConstantMean.forward(self, x) + 0.1 * numbers


class Weighted(VariationalELBO):
    """A loss of the user's own, which counts its calls if it is told to."""

    def __init__(self, *args, counts=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.counts, self.weights = counts, [1.0]

    def _log_likelihood_term(self, *args, **kwargs):
        if self.counts is not None:
            self.counts.append(1)
        return super()._log_likelihood_term(*args, **kwargs) * self.weights[0]


class Moving(Sparse):
    """Its network and its model keep averages."""

    def __init__(self, **options):
        super().__init__(**options)
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("average", torch.zeros(2))

    def forward(self, x):
        x = self.norm(x)
        self.average.lerp_(x.detach()[0], 0.1)
        return Sparse.forward(self, x + self.average)


class Forked(ConstantMean):
    """A mean whose draws leave the program's random state as it was."""

    def forward(self, x):
        with torch.random.fork_rng():
            return ConstantMean.forward(self, x) + 0.1 * torch.randn(x.shape[:-1], dtype=DOUBLE)


class Rectified(Sparse):
    """Its points are rectified by slopes that are drawn."""

    def forward(self, x):
        return super().forward(torch.nn.functional.rrelu(x - 0.5, training=True))


COUNTED = functools.partial(Weighted, counts=CALLS)
EFFECTS = [{"model": Counting}, {"model": Moving}, {"mll": COUNTED}, {"mean": Drawing}, {"mean": Forked}]
OWN_DRAWS = torch.Generator(), torch.Generator()


@pytest.mark.parametrize("options", EFFECTS)
@as_library()
def test_effects_and_random_draws_are_the_library_s(options):
    CALLS.clear()
    for seed, generator in enumerate(OWN_DRAWS):
        generator.manual_seed(seed)
    found = trained(lambda: sparse(**options))
    states = torch.get_rng_state(), *(generator.get_state() for generator in OWN_DRAWS)
    return [*found, torch.tensor(len(CALLS)), *states]


DRAWING = {
    "expectation": lambda: sparse(Poisson()),
    "points": lambda: sparse(model=Noisy),
    "slopes": lambda: sparse(model=Rectified),
    "hidden values": deep,
    "hidden values and expectation": lambda: deep(Poisson()),
}


@pytest.mark.parametrize("make", DRAWING.values(), ids=DRAWING)
@as_library(served=8)
def test_draws_are_replayed_with_the_library_s_random_numbers(make):
    """Also after another seed, and where the program draws between the model's call and the loss."""

    def reseed(mll, at):
        if at == 9:
            torch.manual_seed(3)
        elif at > 5:
            torch.rand(at)

    found = [*trained(make, reseed), torch.get_rng_state()]
    return [*found, *trained(make, reseed, inside=True), torch.get_rng_state()]


@pytest.mark.parametrize("make", DRAWING.values(), ids=DRAWING)
@as_library(served=2, bound=1e-7)
def test_derivatives_by_the_library_are_those_of_the_draw(make):
    """Second ones, and those of other uses of a distribution."""
    mll, found = prepared(make), []
    parameters = list(mll.parameters())
    for at in range(2):
        (x,), y = batch(mll, at)
        torch.rand(3)
        output = mll.model(x)
        torch.rand(3)
        loss = mll(output, y)
        torch.rand(3)
        slopes = torch.autograd.grad(loss + output.variance.sum(), parameters, create_graph=True)
        torch.rand(3)
        found += [*slopes, *torch.autograd.grad(sum(slope.square().sum() for slope in slopes), parameters)]
    return [*found, torch.get_rng_state()]


@as_library()
def test_a_comparison_that_fails_draws_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variational._Step, "_agree", lambda *args: False)
        return [*trained(lambda: sparse(Poisson())), torch.get_rng_state()]


BETWEEN = {
    "beta": lambda mll: setattr(mll.base_mll, "beta", 0.1),
    "likelihood": lambda mll: setattr(mll.base_mll, "likelihood", GaussianLikelihood().double()),
    "frozen": lambda mll: mll.likelihood.noise_covar.raw_noise.requires_grad_(False),
    "another model's class": lambda mll: setattr(mll.model, "__class__", type("Other", (Other, type(mll.model)), {})),
}


class Other:
    """A model of twice the mean."""

    def __call__(self, x):
        return super().__call__(x) * 2.0


@pytest.mark.parametrize("inside", [False, True], ids=["before", "after the model's call"])
@pytest.mark.parametrize("change", BETWEEN)
@as_library(served=4)
def test_what_changes_in_a_deep_model_counts_at_once(change, inside):
    return trained(deep, once(BETWEEN[change], 10), inside=inside)


@pytest.mark.parametrize("where", ["loss", "call and loss", "before the backward pass"])
@as_library(served=3, bound=1e-7)
def test_settings_and_modes_are_those_of_each_call(where):
    mll, found = {"loss": lambda: sparse(Poisson())}.get(where, deep)(), []
    few = functools.partial(gpytorch.settings.num_likelihood_samples, 4)
    for at in range(12):
        (x,), y = batch(mll, at)
        with few() if where == "call and loss" else contextlib.nullcontext():
            output = mll.model(x)
            with few() if where == "loss" and at > 7 else contextlib.nullcontext():
                loss = mll(output, y) + output.variance.mean()
        mll.train(where != "before the backward pass")
        found += torch.autograd.grad(loss, list(mll.parameters()))
        mll.train()
    return [*found, torch.get_rng_state()]


@as_library(served=2, bound=1e-7)
def test_points_that_are_written_after_the_loss():
    mll = prepared(sparse)
    (x,), y = batch(mll, 3)
    parameters, x = list(mll.parameters()), x.clone()
    output = mll.model(x)
    x += 0.1
    slopes = torch.autograd.grad(mll(output, y), parameters, create_graph=True)
    return [*torch.autograd.grad(sum(s.square().sum() for s in slopes), parameters), *called(mll)[:1]]


@as_library(served=4)
def test_outputs_of_a_deep_model_apart():
    mll, found = deep(MultitaskGaussianLikelihood(num_tasks=2), outputs=2), []
    for at in range(9):
        (x,), y = batch(mll, at)
        output = mll.model(x)
        mll(output, torch.stack([y, -y], -1)).backward()
        found += [output.to_data_independent_dist().stddev.detach()]
    return found


@pytest.mark.parametrize("make", [sparse, deep])
@as_library(served=3)
def test_another_call_of_the_model_before_the_loss_counts(make):
    """It leaves other caches, without a graph, from which the divergence is computed."""
    mll, found = make(), []
    for at in range(12):
        (x,), y = batch(mll, at)
        mll.zero_grad()
        output = mll.model(x)
        if at > 7:
            with torch.no_grad():
                mll.model(x + 0.1)
        mll(output, y).backward()
        found += [p.grad.clone() for p in mll.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize("make", [sparse, deep])
def test_short_loops_are_not_recorded(make, monkeypatch):
    """The loss of a deep model calls that of its last layer, which is no step of its own."""
    monkeypatch.setattr(hooks, "_ENOUGH_VARIATIONAL", 10)
    monkeypatch.setattr(hooks, "repaid", set())
    mll, seen = make(), []
    with install.enabled():
        for at in range(11):
            (x,), y = batch(mll, at)
            mll(mll.model(x), y).backward()
            seen.append(variational._steps.get(mll.model) is not None)
    assert seen == [False] * 10 + [True]


class Listed(Deep):
    def forward(self, x):
        return [super().forward(x)]


@as_library()
def test_a_model_with_a_list_of_distributions():
    mll, found = deep(model=Listed), []
    for at in range(9):
        (x,), y = batch(mll, at)
        found.append(mll(mll.model(x)[0], y))
    return found


class Many(ConstantMean):
    """A mean with numbers of its own, which no parameter holds."""

    def __init__(self):
        super().__init__()
        self.many = torch.zeros(300_000, dtype=DOUBLE)

    def forward(self, x):
        return self.many[: x.shape[-2]] + self.many.mean()


OWN = {
    "a large tensor": lambda mll: mll.model.mean_module.many.data.fill_(0.9),
    "a list": lambda mll: mll.weights.__setitem__(0, 3.0),
    "a tensor": lambda mll: mll.beta.data.fill_(0.7),
    "a class": lambda mll: setattr(type(mll), "weights", [2.0]) or vars(mll).pop("weights", None),
}


@pytest.mark.parametrize("inside", [False, True], ids=["before", "after the model's call"])
@pytest.mark.parametrize("change", OWN)
@as_library()
def test_losses_of_your_own_are_looked_at(change, inside):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weighted, "weights", None, raising=False)
        make = functools.partial(sparse, mll=functools.partial(Weighted, beta=torch.ones(())), mean=Many)
        return trained(make, once(OWN[change], 10), inside=inside)


@as_library()
def test_a_backward_pass_under_another_setting_is_that_of_the_call():
    mll, found = sparse(), []
    for at in range(12):
        mll.zero_grad()
        loss, output = called(mll, at)
        with gpytorch.settings.lazily_evaluate_kernels(at < 9):
            (loss + output.variance.mean()).backward()
        found += [p.grad for p in mll.parameters() if p.grad is not None]
    return found
