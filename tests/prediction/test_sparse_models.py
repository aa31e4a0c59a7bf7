"""Distributions of sparse variational models in training: derivatives, what they leave, when the library computes."""

import copy
import gc
import pickle

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from gpytorch.variational import variational_strategy as of_library
from support.outcomes import assert_close, count

import autokern
from autokern.hooks import install
from autokern.prediction.variational import VariationalCovariance

DOUBLE = torch.float64


class Sparse(gpytorch.models.ApproximateGP):
    def __init__(self, m=5, kernel=None):
        inducing = torch.rand(m, 2, generator=torch.Generator().manual_seed(1))
        super().__init__(VariationalStrategy(self, inducing, CholeskyVariationalDistribution(m)))
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), kernel or ScaleKernel(RBFKernel())
        self.calls = 0
        self.variational_strategy.variational_params_initialized.fill_(1)
        q = self.variational_strategy._variational_distribution
        with torch.no_grad():
            q.variational_mean.copy_(torch.linspace(-1, 1, m))
            q.chol_variational_covar.add_(torch.linspace(-0.3, 0.3, m * m).view(m, m))

    def forward(self, x):
        self.calls += 1
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def made(**options):
    return Sparse(**options).double().train()


def points(n=9):
    return torch.rand(n, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def enabled():
    with install.enabled():
        yield


def served(model, x=None):
    """How many calls of a model the op has served, and the distribution."""
    before = count("variational")
    found = model(points() if x is None else x)
    return count("variational") - before, found


@pytest.mark.parametrize(("m", "kernel"), [(4, RBFKernel), (10, lambda: MaternKernel(2.5))])
def test_first_and_second_derivatives_are_those_of_the_formula(m, kernel):
    """Those of stock are not: its functions keep no graph of their first derivatives."""
    model, x = made(m=m, kernel=ScaleKernel(kernel())), points(7)
    names, start = zip(*((n, p.detach()) for n, p in model.named_parameters()), strict=True)

    def read(*values):
        p = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))
        return p.mean, p.variance

    inputs = [p.clone().requires_grad_() for p in start]
    assert torch.autograd.gradcheck(read, inputs)
    assert torch.autograd.gradgradcheck(lambda *v: read(*v)[0].sum() + read(*v)[1].log().sum(), inputs, atol=1e-4)
    assert count("variational", "closed_form") > 0


def test_the_model_is_called_once():
    model = made()
    calls, p = served(model)
    assert (calls, model.calls, type(p.lazy_covariance_matrix)) == (1, 1, VariationalCovariance)


def test_all_but_the_diagonal_is_the_library_s_operator():
    model = made()
    p = served(model)[1]
    covariance = p.lazy_covariance_matrix
    with autokern.using(force={"variational": "stock"}):
        theirs = made()(points())
    torch.testing.assert_close(covariance.to_dense(), theirs.covariance_matrix)
    assert type(covariance.formed()) is type(theirs.lazy_covariance_matrix)
    assert covariance.shape == theirs.lazy_covariance_matrix.shape
    assert covariance.dtype == DOUBLE
    detached = MultivariateNormal(p.mean.detach(), covariance.detach())
    for again in (copy.deepcopy(detached), pickle.loads(pickle.dumps(detached))):
        torch.testing.assert_close(again.variance, p.variance.detach())


CHANGES = {
    "a method of the strategy": lambda model, _: model.variational_strategy.__dict__.update(
        _compute_predictive_updates=VariationalStrategy._compute_predictive_updates.__get__(model.variational_strategy)
    ),
    "a method of its class": lambda _, patch: patch.setattr(VariationalStrategy, "_cholesky_factor", lambda s, k: None),
    "a function of its module": lambda _, patch: patch.setattr(of_library, "psd_safe_cholesky", lambda k: None),
    "a jitter that requires a gradient": lambda model, _: setattr(
        model.variational_strategy, "jitter_val", torch.tensor(0.1, dtype=DOUBLE, requires_grad=True)
    ),
    "a kernel of the user's": lambda model, _: setattr(model, "covar_module", type("Own", (RBFKernel,), {})().double()),
    "evaluation": lambda model, _: model.eval(),
    "another precision": lambda _, patch: patch.setattr(
        gpytorch.settings._linalg_dtype_cholesky, "_global_value", torch.float32
    ),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_left_to_the_library(name, monkeypatch):
    model = made()
    CHANGES[name](model, monkeypatch)
    before = count("variational", "closed_form")
    try:
        model(points())
    except AttributeError:
        assert name in ("a method of its class", "a function of its module")
    assert count("variational", "closed_form") == before


def test_a_covariance_that_is_no_number_raises_the_library_s_error():
    model = made(m=3)
    with torch.no_grad():
        model.variational_strategy.inducing_points.fill_(float("nan"))
    with pytest.raises(Exception, match="NaN") as ours:
        model(points())
    with autokern.using(force={"variational": "stock"}), pytest.raises(type(ours.value), match="NaN"):
        model(points())


class Moved(Sparse):
    """Its method writes into its points, or multiplies them by a parameter, or by the parameter's value."""

    def __init__(self, how):
        super().__init__()
        self.how, self.by = how, torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(self.how(x, self.by))


MOVES = {
    "written": lambda x, by: x.mul_(3.0),
    "written past the version": lambda x, by: [x.data.mul_(3.0), x][1],
    "written by a parameter": lambda x, by: x.mul_(by),
    "multiplied by a parameter": lambda x, by: x * by,
    "as they are": lambda x, by: x,
}


@pytest.mark.parametrize("name", MOVES)
def test_samples_of_points_share_inducing_points_that_nothing_maps(name):
    found = []
    for order in ("closed_form", "stock"):
        model = Moved(MOVES[name]).double().train()
        with autokern.using(force={"variational": order}):
            p = model(torch.stack((points(), points() + 0.3)))
            loss = p.mean.sin().sum() + p.variance.log().sum()
        slopes = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        found.append([p.mean, p.variance, *slopes])
    assert_close(*found)


@pytest.mark.parametrize("served", [True, False], ids=["by keyword", "by position"])
def test_inducing_points_that_are_given_have_the_gradient(served):
    """An argument that says whether variances suffice is left to the library where it has no name."""
    found, before = [], count("variational", "closed_form")
    more = ((), {"diag": True}) if served else ((None, True), {})
    for order in ("closed_form", "stock"):
        strategy = made().variational_strategy
        z = strategy.inducing_points.detach().expand(2, -1, -1).clone().requires_grad_()
        with autokern.using(force={"variational": order}):
            p = strategy.forward(points().expand(2, -1, -1), z, torch.ones(5, dtype=DOUBLE), *more[0], **more[1])
        found.append([p.mean, *torch.autograd.grad(p.mean.sin().sum(), [z])])
    assert_close(*found)
    assert count("variational", "closed_form") - before == served


def test_what_is_read_has_a_graph_in_the_reader_s_mode():
    p = made()(points())
    with torch.no_grad():
        assert not p.variance.requires_grad
    assert p.variance.requires_grad


def test_no_tensor_waits_for_the_garbage_collector():
    model = made()

    def tensors():
        model(points()).variance.sum().backward()
        model.variational_strategy._clear_cache()
        return sum(type(one) is torch.Tensor for one in gc.get_objects())

    tensors()
    gc.collect()
    gc.disable()
    try:
        assert len({tensors() for _ in range(3)}) == 1
    finally:
        gc.enable()


def test_explain_names_the_op_and_says_that_nothing_is_replayed():
    text = str(autokern.explain(made()))
    assert "variational by closed_form" in text
    assert "replay" not in text
