"""Replayed marginal likelihoods of models that hold, add or change more than a kernel's parameters."""

import warnings

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from gpytorch.mlls.added_loss_term import AddedLossTerm
from gpytorch.priors import GammaPrior
from support.losses import DOUBLE, Model, Own, Sparse, as_library, called, noisy, once, points, single, sparse, trained

from autokern.core.replay import recording
from autokern.hooks import install
from autokern.hooks.later import losses

pytestmark = pytest.mark.usefixtures("at_once", "restored")
GLOBAL = torch.ones(1, dtype=DOUBLE)


def grown(x, by=1.0, *, more=1.0):
    return x * by * more * grown.rate


grown.rate = 1.0
GROWN = grown.__code__


class Plain(Kernel):
    """A kernel of the user's with a tensor, a buffer, a matrix, a count, noise and functions with defaults."""

    has_lengthscale = True

    def __init__(self, drops=False, **options):
        super().__init__(lengthscale_constraint=Interval(0.01, 5.0), **options)
        self.drops, self.factor = drops, torch.ones(1, dtype=DOUBLE)
        self.register_buffer("many", torch.ones(300_000, dtype=DOUBLE))
        self.turn = torch.nn.Parameter(torch.tensor([[1.0, 0.5], [0.2, 1.0]], dtype=DOUBLE))

    def forward(self, x1, x2, diag=False, power=1.0, **params):
        a, b = x1 @ self.turn / self.lengthscale, x2 @ self.turn / self.lengthscale
        found = torch.exp(-power * self.covar_dist(a, b, diag=diag, square_dist=True))
        scale = self.factor * self.many.mean() * GLOBAL * torch.unique(x1[..., 0]).numel() / 12
        if self.drops:
            scale = scale * (1 + 0.1 * torch.nn.functional.dropout(torch.ones(1, dtype=DOUBLE)))
        return found * grown(scale) + torch.tensor(1 / 3).to(DOUBLE)


def restore():
    GLOBAL.data.fill_(1.0)
    Plain.forward.__defaults__ = (False, 1.0)
    grown.__code__, grown.__defaults__, grown.__kwdefaults__, grown.rate = GROWN, (1.0,), {"more": 1.0}, 1.0
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def restored():
    yield
    restore()


def plain():
    restore()
    return single(ScaleKernel(Plain()))


def leave_one_out():
    return single(ScaleKernel(RQKernel()), kind=LeaveOneOutPseudoLikelihood)


def kernel_of(mll):
    return mll.model.covar_module.base_kernel


def noise_of(mll):
    return mll.likelihood.noise_covar


def evaluated(mll, at):
    if at % 4 == 3:
        mll.eval()
        with torch.no_grad():
            mll.found = mll.model(points(3)).variance.sum().item()
        mll.train()
        del mll.found


class Term(AddedLossTerm):
    def loss(self, *params):
        return self.parameter.square().sum()


def term_added(mll):
    term = Term()
    term.parameter = mll.model.covar_module.raw_outputscale
    mll.model.register_added_loss_term("late")
    mll.model.update_added_loss_term("late", term)


def terms_doubled(mll):
    stock = mll._add_other_terms
    mll._add_other_terms = lambda *args: 2 * stock(*args)


def transposed(mll):
    turn = kernel_of(mll).turn
    turn.data = turn.data.t()


def repeated_point(mll):
    mll.model.train_inputs[0][0] = mll.model.train_inputs[0][1]


EXACT, ALL, ELBO, PLAIN = ["one", "leave one out"], ["one", "leave one out", "elbo"], ["elbo"], ["plain"]
MAKES = {"one": single, "leave one out": leave_one_out, "elbo": sparse, "plain": plain, "noisy": noisy}
CHANGES = {
    "frozen": (ALL, once(lambda mll: noise_of(mll).raw_noise.requires_grad_(False))),
    "written": (ALL, once(lambda mll: next(mll.model.covar_module.parameters()).data.fill_(0.7))),
    "prior added": (
        ALL, once(lambda mll: mll.model.covar_module.register_prior("p", GammaPrior(3.0, 2.0), "outputscale")),
    ),
    "evaluated": (ALL, evaluated),
    "other data": (
        EXACT, once(lambda mll: mll.model.set_train_data(points() + 0.1, (2 * points()).cos().sum(-1), strict=False)),
    ),
    "targets in place": (EXACT, lambda mll, at: mll.model.train_targets.mul_(1.01)),
    "another kernel": (["one"], once(lambda mll: setattr(mll.model.covar_module, "base_kernel", Own().double()))),
    "points frozen": (ELBO, once(lambda mll: mll.model.variational_strategy.inducing_points.requires_grad_(False))),
    "other number": (ELBO, once(lambda mll: setattr(mll, "num_data", 1000))),
    "other beta": (ELBO, once(lambda mll: setattr(mll, "beta", 0.1))),
    "constraint": (ELBO, once(lambda mll: noise_of(mll).register_constraint("raw_noise", GreaterThan(0.2)))),
    "jitter": (
        ELBO, lambda mll, at: setattr(mll.model.variational_strategy, "jitter_val", 1e-3 if at < 7 else 1e-2),
    ),
    "an attribute, through data": (PLAIN, once(lambda mll: kernel_of(mll).factor.data.mul_(2))),
    "an attribute, through NumPy": (PLAIN, once(lambda mll: kernel_of(mll).factor.numpy().fill(2.0))),
    "a large buffer, through data": (PLAIN, once(lambda mll: kernel_of(mll).many.data.mul_(2))),
    "a global tensor": (PLAIN, once(lambda mll: GLOBAL.data.mul_(2))),
    "defaults of a function": (PLAIN, once(lambda mll: setattr(Plain.forward, "__defaults__", (False, 2.0)))),
    "code of a function": (PLAIN, once(lambda mll: setattr(grown, "__code__", (lambda x, by: x * 3.0).__code__))),
    "defaults of a function of the module": (PLAIN, once(lambda mll: setattr(grown, "__defaults__", (3.0,)))),
    "keyword defaults of a function": (PLAIN, once(lambda mll: setattr(grown, "__kwdefaults__", {"more": 3.0}))),
    "an attribute of a function": (PLAIN, once(lambda mll: setattr(grown, "rate", 3.0))),
    "the default dtype": (PLAIN, once(lambda mll: torch.set_default_dtype(torch.float64))),
    "a loss term": (PLAIN, once(term_added)),
    "a method of the marginal likelihood": (PLAIN, once(terms_doubled)),
    "strides": (PLAIN, once(transposed)),
    "a number that only Python reads": (PLAIN, once(repeated_point)),
    "fixed noise, through data": (["noisy"], once(lambda mll: noise_of(mll).noise.data.mul_(3))),
}  # fmt: skip


@pytest.mark.parametrize(("make", "name"), [(make, name) for name, (makes, _) in CHANGES.items() for make in makes])
@as_library(served=1)
def test_what_changes_in_a_loop_counts_at_once(make, name):
    return trained(MAKES[make], CHANGES[name][1])


REPLACED = {
    "one": [(Own, "forward"), (ScaleKernel, "forward"), (gpytorch.constraints.Positive, "transform"),
            (torch, "exp"), (torch.nn.functional, "softplus")],
    "elbo": [(Sparse, "forward"), (RBFKernel, "forward"), (GaussianLikelihood, "expected_log_prob")],
}  # fmt: skip


@pytest.mark.parametrize(("make", "place"), [(make, place) for make, places in REPLACED.items() for place in places])
@as_library()
def test_a_function_that_is_replaced_counts_at_once(make, place):
    """One that the recording ran, on a class of the user's, of a library or on a module of torch."""
    stock = getattr(*place)
    with pytest.MonkeyPatch.context() as patch:
        return trained(
            MAKES[make], once(lambda mll: patch.setattr(*place, lambda *args, **options: stock(*args, **options) * 2))
        )


class Weighted(ExactMarginalLogLikelihood):
    """A marginal likelihood of the user's, which counts."""

    calls = 0

    def _add_other_terms(self, res, params):
        self.calls += 1
        return super()._add_other_terms(res, params) / self.calls


class Without(Model):
    """A model whose priors count at first only."""

    without = False

    def named_priors(self, *args, **options):
        return iter(()) if self.without else super().named_priors(*args, **options)


@pytest.mark.parametrize("case", ["marginal likelihood", "model"])
@as_library()
def test_methods_of_the_users_run_each_time(case):
    def make():
        if case == "marginal likelihood":
            return single(kind=Weighted)
        mll = single()
        model = Without(points(), mll.model.train_targets, mll.likelihood, mll.model.covar_module, ConstantMean())
        return ExactMarginalLogLikelihood(mll.likelihood, model.double())

    return trained(make, once(lambda mll: setattr(mll.model, "without", True)))


class Hidden(Model):
    """A model whose kernel is in a list that torch does not know."""

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.kind[0](x))


@pytest.mark.parametrize("case", ["kernel", "global"])
@as_library()
def test_gradients_reach_what_is_no_parameter(case):
    hidden, x, mll = ScaleKernel(Own()).double(), points(), plain()
    if case == "kernel":
        model = Hidden(x, x.sum(-1), mll.likelihood, None, ConstantMean(), kind=[hidden]).double()
        mll = ExactMarginalLogLikelihood(mll.likelihood, model)
    GLOBAL.requires_grad_(case == "global")
    for _ in range(8):
        called(mll)[0].backward()
    found = [p.grad for p in hidden.parameters()] if case == "kernel" else [GLOBAL.grad]
    GLOBAL.requires_grad_(False).grad = None
    return found


@pytest.mark.parametrize("batch", [(), (3,)])
@as_library()
def test_random_numbers_are_drawn_once(batch):
    x, shape = points().expand(*batch, 12, 2), torch.Size(batch)
    torch.manual_seed(0)
    mean, kernel = ConstantMean(batch_shape=shape), Plain(drops=True, batch_shape=shape)
    model = Model(x, x.sum(-1), GaussianLikelihood(batch_shape=shape), kernel, mean).double()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    return [*(called(mll)[0].detach().clone() for _ in range(8)), torch.rand(1)]


def test_a_warning_that_was_filtered_while_recording_comes():
    with install.enabled():
        mll = noisy(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(8):
                called(mll)
        with pytest.warns(gpytorch.utils.warnings.GPInputWarning):
            called(mll)


def test_a_warning_of_each_step_comes_twice_more_at_most():
    def shown():
        mll = noisy(5)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(8):
                called(mll)[0].backward()
        return len(found)

    expected = shown()
    with install.enabled():
        assert expected <= shown() <= expected + 2


@pytest.mark.parametrize("place", [lambda mll: vars(kernel_of(mll)), lambda mll: kernel_of(mll)._parameters])
@as_library()
def test_a_model_with_a_tensor_without_memory_is_the_librarys(place):
    """Transforms leave such ones behind, where an error ends them."""
    mll = single()
    value = kernel_of(mll).raw_power.detach()
    torch.func.grad(lambda x: [place(mll).update(raw_power=x), x.sum()][1])(value)
    return [called(mll)[0] for _ in range(8)]


@pytest.mark.parametrize("case", ["a kernel of the user's", "frozen", "a buffer", "variational"])
@as_library(served=4)
def test_a_covariance_is_that_of_its_time(case):
    """A step, or a change of what a kernel of the user's holds, comes before it is read."""
    mll, found = {"a buffer": plain, "variational": sparse}.get(case, single)(), []
    kernel_of(mll).raw_lengthscale.requires_grad_(case != "frozen")
    optimizer = torch.optim.Adam(mll.parameters(), lr=0.05)
    for at in range(12):
        optimizer.zero_grad()
        loss, prior = called(mll, at)
        loss.neg().backward()
        optimizer.step()
        if case == "a buffer" and at == 11:
            kernel_of(mll).factor.mul_(1.1)
        late = prior.variance if case == "variational" else prior.covariance_matrix
        found += [prior.mean.detach(), late.detach()]
    return found


def test_a_loop_that_no_recording_fits_makes_one(monkeypatch):
    recorded = []
    stock = losses.Loss._recorded
    monkeypatch.setattr(losses.Loss, "_recorded", lambda self, *call: recorded.append(1) or stock(self, *call))
    with install.enabled():
        mll = plain()
        for at in range(300):
            kernel_of(mll).at = at
            called(mll)
    assert len(recorded) == 1


def test_many_models_keep_few_recordings(monkeypatch):
    """The newest ones, whose memory is within the limit; the library serves the others."""
    monkeypatch.setattr(recording, "_living", [])
    monkeypatch.setattr(recording, "_MOST_OF_ALL", 200_000)
    with install.enabled():
        every = [plain() for _ in range(8)]
        first = [called(mll)[0].item() for mll in every]
        for mll in every * 6:
            called(mll)
        assert {losses._known.get(mll).serves for mll in every} == {False, True}
        assert [called(mll)[0].item() for mll in every] == pytest.approx(first)


@pytest.mark.parametrize("on", [lambda loc: loc, lambda loc: loc.grad_fn], ids=["tensor", "node"])
def test_hooks_of_the_callers_graph_run_once_a_step(on):
    with install.enabled():
        mll, seen = plain(), []
        for _ in range(8):
            prior = mll.model(*mll.model.train_inputs)
            on(prior.loc).register_hook(lambda *args: seen.append(args))
            mll(prior, mll.model.train_targets).backward()
    assert len(seen) == 8
