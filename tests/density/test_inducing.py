"""Marginal likelihoods with inducing points are the library's, with its warnings and the loss that it adds."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from gpytorch.constraints import Interval
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import (
    ConstantKernel,
    InducingPointKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean, LinearMean
from gpytorch.mlls import ExactMarginalLogLikelihood, InducingPointKernelAddedLossTerm
from gpytorch.models import ExactGP
from gpytorch.priors import GammaPrior, LogNormalPrior
from linear_operator.settings import cholesky_jitter
from linear_operator.utils.warnings import NumericalWarning
from support.densities import by, served
from support.outcomes import assert_close, outcome

import autokern
from autokern.core.op import copied

N, DOUBLE = 40, torch.float64


class Model(ExactGP):
    def __init__(self, kernel, count=6, mean=None, likelihood=None, d=2, dtype=DOUBLE):
        torch.manual_seed(7)
        x = torch.rand(N, d, dtype=DOUBLE).to(dtype)
        y = (3 * x.sum(-1)).sin() + 0.1 * torch.randn(N, dtype=DOUBLE).to(dtype)
        super().__init__(x, y, GaussianLikelihood(noise_prior=GammaPrior(1.1, 0.5)))
        self.mean_module = mean or ConstantMean()
        self.covar_module = InducingPointKernel(kernel, x[:count] + 0.01, likelihood or self.likelihood)
        self.to(dtype)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    @property
    def mll(self):
        return ExactMarginalLogLikelihood(self.likelihood, self)


def linear():
    torch.manual_seed(5)
    return LinearMean(2)


def loss(model, x=None):
    x = model.train_inputs[0] if x is None else x
    return -model.mll(model(x), model.train_targets)


def slopes(model, of=loss, **how):
    return torch.autograd.grad(of(model), [*model.parameters()], **how)


def agree(ours, theirs, within=1e-9):
    most = max(float(b.detach().abs().max()) for b in theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=within, atol=within * most)


MODELS = {
    "scaled rbf": lambda: Model(ScaleKernel(RBFKernel(lengthscale_prior=LogNormalPrior(0.0, 1.0)))),
    "ard": lambda: Model(ScaleKernel(MaternKernel(ard_num_dims=2)), mean=linear()),
    "rough": lambda: Model(MaternKernel(nu=0.5), count=9),
    "sum": lambda: Model(ScaleKernel(RBFKernel(active_dims=(1,))) + LinearKernel()),
    "product": lambda: Model(RBFKernel() * PeriodicKernel(active_dims=(0,)), count=4),
    "one inducing point": lambda: Model(ScaleKernel(RBFKernel()), count=1),
}


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
@pytest.mark.parametrize("made", MODELS.values(), ids=MODELS)
def test_values_and_gradients(made, dtype):
    ours, theirs, exact = made().to(dtype), made().to(dtype), made().to(dtype).double()
    with autokern.enabled(), by("objective"):
        value, found = loss(ours), slopes(ours)
        assert served("objective") == 2
    within = 1e-9 if dtype is DOUBLE else 1e-3
    agree([value, *found], [loss(theirs), *slopes(theirs)], within)
    agree([value.double(), *(g.double() for g in found)], [loss(exact), *slopes(exact)], within)


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_singular_covariances_get_the_librarys_jitter_and_warnings(dtype):
    ours, theirs = (Model(ScaleKernel(RBFKernel()), 20, d=1, dtype=dtype) for _ in range(2))
    with autokern.enabled(), by("objective"):
        with pytest.warns(NumericalWarning, match="added jitter") as told:
            found = [loss(ours).detach()]
        assert served("objective") == 1
    with pytest.warns(NumericalWarning) as expected:
        agree(found, [loss(theirs).detach()], 1e-9 if dtype is DOUBLE else 1e-5)
    assert [str(one.message) for one in told] == [str(one.message) for one in expected]


def doubled(dtype=DOUBLE):
    """A model whose inducing points occur twice."""
    model = Model(ScaleKernel(MaternKernel(ard_num_dims=2)), 12, dtype=dtype)
    model.covar_module.inducing_points.data[6:] = model.covar_module.inducing_points.data[:6]
    return model


def unobserved(model):
    model.train_targets[0] = float("nan")
    return [loss(model)]


def hopeless(model):
    model.covar_module.base_kernel.outputscale = 1e12
    loss(model)


def read(model):
    prior = model(*model.train_inputs)
    model.mll(prior, model.train_targets)
    (added,) = model.added_loss_terms()
    return added.loss(), prior.lazy_covariance_matrix.evaluate_kernel().to_dense()


def curved(model):
    with cholesky_jitter(double_value=1e-3):
        found = slopes(model, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in found), [*model.parameters()])


@pytest.mark.parametrize("act", [unobserved, hopeless, read, curved])
def test_jitter_is_told_once(act):
    ours, theirs = doubled(), doubled()
    with autokern.enabled(), by("objective"):
        found, told = outcome(act, ours)
        assert served("objective")
    expected, warned = outcome(act, theirs)
    assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert told == warned != []


@pytest.mark.parametrize("away", [1e3, 1e5])
def test_inducing_points_far_from_the_points(away):
    ours, theirs = (Model(ScaleKernel(RBFKernel()) + ConstantKernel()) for _ in range(2))
    for model in (ours, theirs):
        model.covar_module.inducing_points.data += away
    with autokern.enabled(), by("objective"):
        found = [loss(ours), *slopes(ours)]
        assert served("objective") == 2
    agree(found, [loss(theirs), *slopes(theirs)])


@pytest.mark.parametrize(("dtype", "away", "count", "wide"), [(torch.float32, 1e5, 10, 10.0), (DOUBLE, 1e6, 20, 4.0)])
def test_points_far_from_zero_are_as_exact_as_in_the_library(dtype, away, count, wide):
    def found_by():
        model = Model(ScaleKernel(RBFKernel()), count, d=1)
        with torch.no_grad():
            for points in (model.train_inputs[0], model.covar_module.inducing_points.sub_(0.01)):
                points.mul_(wide).add_(away)
        model.to(dtype)
        return [loss(model), *slopes(model)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with autokern.enabled(), by("objective"):
            found = found_by()
            assert served("objective") == 2
        expected = found_by()
    agree(found, expected, 1e-7 if dtype is DOUBLE else 0.05)


def test_the_added_loss_outlives_changes_of_the_points():
    ours, theirs = MODELS["ard"](), MODELS["ard"]()
    with autokern.enabled(), by("objective"):
        loss(ours)
    loss(theirs)
    for model in (ours, theirs):
        model.train_inputs[0].add_(1.0)
    agree(*([next(model.added_loss_terms()).loss()] for model in (ours, theirs)))


def left_behind(model):
    prior = model(*model.train_inputs)
    model.mll(prior, model.train_targets)
    model.float()
    pickle.dumps(model.covar_module._added_loss_terms)
    return prior.covariance_matrix, next(model.added_loss_terms()).variational_dist.covariance_matrix


def test_what_a_step_leaves_keeps_its_dtype():
    with autokern.enabled(), by("objective"):
        found = left_behind(MODELS["ard"]())
        assert served("objective") == 1
    agree(found, left_behind(MODELS["ard"]()))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["loss", "__init__"])
def test_an_added_loss_of_the_users(monkeypatch, name, late):
    plain, model = vars(InducingPointKernelAddedLossTerm)[name], MODELS["ard"]()

    def own(self, *args):
        if name == "loss":
            return 3 * plain(self, *args)
        return plain(self, *args[:1], *args[:1], *args[2:])

    with autokern.enabled(), by("objective"):
        if late:
            loss(model)
        monkeypatch.setattr(InducingPointKernelAddedLossTerm, name, own)
        found = loss(model)
    agree([found], [loss(MODELS["ard"]())])


def test_readings_keep_no_kernel():
    def used():
        model = MODELS["ard"]()
        loss(model).backward()
        return weakref.ref(model.covar_module)

    with autokern.enabled(), by("objective"):
        kernel = used()
        gc.collect()
    assert kernel() is None


def test_the_added_loss_is_that_of_the_step():
    ours, theirs = MODELS["scaled rbf"](), MODELS["scaled rbf"]()
    with autokern.enabled(), by("objective"):
        prior = ours(*ours.train_inputs)
        ours.mll(prior, ours.train_targets)
        (added,) = ours.added_loss_terms()
        assert isinstance(added, InducingPointKernelAddedLossTerm)
        assert added.likelihood is ours.likelihood
    loss(theirs)
    (expected,) = theirs.added_loss_terms()
    inducing = theirs.covar_module.inducing_points
    agree(
        [added.loss(), *torch.autograd.grad(added.loss(), [ours.covar_module.inducing_points])],
        [expected.loss(), *torch.autograd.grad(expected.loss(), [inducing])],
    )
    assert type(added) is InducingPointKernelAddedLossTerm
    assert type(added.variational_dist.lazy_covariance_matrix) is type(expected.variational_dist.lazy_covariance_matrix)
    agree([prior.covariance_matrix], [theirs(*theirs.train_inputs).covariance_matrix])


def test_the_added_loss_has_the_values_of_its_step():
    model, other = MODELS["ard"](), MODELS["ard"]()
    with autokern.enabled(), by("objective"):
        loss(model)
        (added,) = model.added_loss_terms()
        with torch.no_grad():
            model.covar_module.inducing_points.add_(0.5)
    loss(other)
    agree(
        [added.variational_dist.covariance_matrix], [next(other.added_loss_terms()).variational_dist.covariance_matrix]
    )


def test_models_are_copied_and_saved_after_a_step():
    model = MODELS["ard"]()
    with autokern.enabled(), by("objective"):
        loss(model).backward()
    file = io.BytesIO()
    torch.save(model.covar_module._added_loss_terms, file)
    file.seek(0)
    (added,) = torch.load(file, weights_only=False).values()
    assert type(added) is InducingPointKernelAddedLossTerm
    own = copy.deepcopy(model.covar_module)
    agree([own(*model.train_inputs).to_dense()], [model.covar_module(*model.train_inputs).to_dense()])


def test_copies_for_measurements_share_no_part():
    model = MODELS["ard"]()
    own = copied(model).float()
    assert own.covar_module.likelihood is own.likelihood
    assert {p.dtype for p in model.parameters()} == {DOUBLE}
    with autokern.enabled():
        assert "arrays" in str(autokern.explain(model))


def test_second_derivatives_and_second_passes():
    def of(model):
        value = loss(model)
        first = torch.autograd.grad(value, [*model.parameters()], create_graph=True)
        kept = next(model.added_loss_terms())
        second = torch.autograd.grad(sum(one.square().sum() for one in first), [*model.parameters()])
        assert next(model.added_loss_terms()) is kept
        return second

    ours, theirs = MODELS["scaled rbf"](), MODELS["scaled rbf"]()
    with autokern.enabled(), by("objective"):
        found = of(ours)
        value = loss(ours)
        for _ in range(2):
            value.backward(retain_graph=True)
    agree(found, of(theirs), 1e-7)
    agree([p.grad for p in ours.parameters()], [2 * one for one in slopes(theirs)])


def frozen(model):
    model.covar_module.inducing_points.requires_grad_(False)


def test_fixed_inducing_points():
    ours, theirs = MODELS["ard"](), MODELS["ard"]()
    for model in (ours, theirs):
        frozen(model)
    with autokern.enabled(), by("objective"):
        loss(ours).backward()
        assert served("objective") == 1
    loss(theirs).backward()
    assert ours.covar_module.inducing_points.grad is None
    agree(*([p.grad for p in model.parameters() if p.grad is not None] for model in (ours, theirs)))


def evaluating(model):
    model.covar_module.eval()


def moved(model):
    model.train_inputs[0].requires_grad_()


def bounded(model):
    model.covar_module.register_constraint("inducing_points", Interval(-1.0, 3.0))


STOCK = {
    "bounds of inducing points, which the library does not apply": (MODELS["ard"], bounded),
    "no derivatives by inducing points": (lambda: Model(ConstantKernel(), count=1), lambda model: None),
    "a likelihood of its own": (lambda: Model(RBFKernel(), likelihood=GaussianLikelihood()), lambda model: None),
    "a scale around it": (MODELS["ard"], lambda model: setattr(model, "covar_module", ScaleKernel(model.covar_module))),
    "a subclass": (
        MODELS["ard"],
        lambda m: setattr(m.covar_module, "__class__", type("Own", (InducingPointKernel,), {})),
    ),
    "points with gradients": (MODELS["ard"], moved),
    "a kernel in evaluation mode": (MODELS["ard"], evaluating),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("made", "change"), STOCK.values(), ids=STOCK)
def test_stock_serves_what_is_not_known(made, change, late):
    ours, theirs = made(), made()
    with autokern.enabled(), by("objective"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if late:
            loss(ours), loss(theirs)
        change(ours), change(theirs)
        count = served("objective")
        found = [loss(ours), *torch.autograd.grad(loss(ours), [*ours.parameters()], allow_unused=True)]
        assert served("objective") == count
    expected = [loss(theirs), *torch.autograd.grad(loss(theirs), [*theirs.parameters()], allow_unused=True)]
    assert [a is None for a in found] == [b is None for b in expected]
    agree(*([one for one in of if one is not None] for of in (found, expected)))


def test_a_covariance_without_a_factor_raises_as_in_the_library():
    model = MODELS["ard"]()
    with torch.no_grad():
        model.covar_module.inducing_points[0, 0] = float("nan")
    with autokern.enabled(), by("objective"), pytest.raises(Exception, match="are NaN"):
        loss(model)
