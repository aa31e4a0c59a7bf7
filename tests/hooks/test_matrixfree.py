"""Models whose covariance does not fit: trained and asked for predictions without it, against stock with all memory."""

import contextlib

import pytest
import torch
from gpytorch import kernels, settings
from gpytorch.kernels import ConstantKernel, LinearKernel, MaternKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.operators import DenseLinearOperator
from support.exact_models import BATCH, NONE, Formed, Regression, assert_close
from support.models import loss_of, points
from support.tiling import used

import autokern
from autokern.core.errors import MemoryBudgetError
from autokern.hooks.kernel_operator import MatrixFreeKernelOperator
from autokern.system import memory

N, ORDER = 1100, "6MiB"
"""A matrix of 9 MiB, and an order that tiles of 512 keep."""


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch):
    monkeypatch.setattr(memory, "LARGE", 2**20)


def values(x):
    noise = torch.randn(x.shape[:-1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (5 * x[..., 0]).sin() + x[..., 1] + 0.3 * noise


def regression(kernel, n=N, form=None, batch=NONE):
    x = points(*batch, n)
    model = (Formed if form else Regression)(x, values(x), kernel, batch=batch)
    model.form, model.likelihood.noise = form, torch.full((*batch, 1), 0.2)
    return model


MODELS = {
    "rbf": lambda: regression(RBFKernel()),
    "matern and scale": lambda: regression(ScaleKernel(MaternKernel(2.5, ard_num_dims=2))),
    "sum": lambda: regression(ScaleKernel(MaternKernel(1.5)) + RBFKernel() + ConstantKernel()),
    "product": lambda: regression(ScaleKernel(RQKernel() * kernels.PeriodicKernel(active_dims=(1,)))),
    "active dimensions": lambda: regression(ScaleKernel(RBFKernel(active_dims=(1,)), active_dims=(1, 0))),
    "batch": lambda: regression(
        ScaleKernel(RBFKernel(batch_shape=BATCH), batch_shape=BATCH), n=900, batch=BATCH
    ),
    "own product": lambda: regression(
        MaternKernel(0.5) * MaternKernel(1.5), form=lambda k, x: k.kernels[0](x) * k.kernels[1](x)
    ),
    "own sum": lambda: regression(RBFKernel() + MaternKernel(1.5), form=lambda k, x: k.kernels[0](x) + k.kernels[1](x)),
}  # fmt: skip
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


@contextlib.contextmanager
def tightly():
    """Few probes, and iterations that go on for long enough to be exact to three digits or so."""
    with contextlib.ExitStack() as stack:
        for context in (
            settings.cg_tolerance(1e-3), settings.eval_cg_tolerance(1e-3), settings.max_cg_iterations(300),
            settings.num_trace_samples(3), settings.max_preconditioner_size(10), settings.min_preconditioning_size(100),
        ):  # fmt: skip
            stack.enter_context(context)
        yield


@contextlib.contextmanager
def without_room(order=ORDER):
    with autokern.enabled(), autokern.using(memory=order):
        yield


def trained(model):
    """Loss and gradients of a step, from the same probes."""
    torch.manual_seed(0)
    with tightly():
        loss = loss_of(ExactMarginalLogLikelihood(model.likelihood, model.train())).sum()
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def predicted(model, variances=True):
    model.eval()
    with torch.no_grad(), tightly():
        out = model(points(*model.train_inputs[0].shape[:-2], 30, seed=4))
        return out.mean, out.variance if variances else None


def near(found, expected, bound):
    assert_close(list(found), list(expected), rtol=bound, atol=bound)


@pytest.mark.slow
@each_model
def test_training_without_room_is_training(make):
    expected = trained(make())
    with without_room():
        found = trained(make())
        assert used() <= {"tiled-symmetric", "tiled-symmetric@512", "tiled"}
        assert used()
    near(found, expected, 1e-3)


@pytest.mark.parametrize("name", ["sum", "active dimensions", "batch", "own product"])
def test_predictions_without_room_are_predictions(name):
    expected = predicted(MODELS[name]())
    with without_room():
        found = predicted(MODELS[name]())
        assert used()
    near(found, expected, 1e-2)


def test_fast_variances_without_room():
    with settings.fast_pred_var(), settings.max_root_decomposition_size(60):
        torch.manual_seed(0)
        expected = predicted(MODELS["matern and scale"]())
        with without_room():
            torch.manual_seed(0)
            found = predicted(MODELS["matern and scale"]())
            assert used()
    near(found, expected, 1e-2)


@pytest.mark.slow
def test_many_test_points_keep_the_order():
    model = MODELS["matern and scale"]().eval()
    with without_room(), torch.no_grad(), settings.skip_posterior_variances():
        assert model(points(5000, seed=4)).mean.shape == (5000,)


def evaluated(n=N, kernel=None, z=None):
    return type((kernel or ScaleKernel(RBFKernel())).double()(points(n), z).evaluate_kernel())


def test_where_the_library_factorises_the_matrix_is_formed_or_refused_and_a_rectangle_is_only_multiplied():
    with autokern.enabled(), settings.max_cholesky_size(2000):
        with autokern.using(memory="100MiB"):
            assert evaluated() is DenseLinearOperator
        with autokern.using(memory=ORDER):
            assert evaluated(700, z=points(3000, seed=2)) is MatrixFreeKernelOperator
            with pytest.raises(MemoryBudgetError, match="evaluate_kernel of ScaleKernel"):
                evaluated()
    with without_room("4MiB"), pytest.raises(MemoryBudgetError):
        evaluated(790)  # below the size from which the library iterates


@pytest.mark.parametrize("order", ["tiled", "tiled-symmetric"])
def test_an_order_to_use_tiles_is_obeyed_on_small_models(order):
    with settings.max_cholesky_size(1):
        expected = trained(regression(MaternKernel(2.5), 60))
        with autokern.enabled(), autokern.using(force={"kernel_matmul": order}):
            near(trained(regression(MaternKernel(2.5), 60)), expected, 1e-4)
            assert used() == {order}


@pytest.mark.parametrize("kernel", [LinearKernel(), RBFKernel() * LinearKernel(), type("Mine", (RBFKernel,), {})()])
def test_a_kernel_that_is_not_known_keeps_its_own_operator(kernel):
    stock = evaluated(100, kernel)
    with autokern.enabled(), autokern.using(force={"kernel_matmul": "tiled"}):
        assert evaluated(100, kernel) is stock
        mixed = RBFKernel()(points(100))  # types of points and parameters that differ are the library's business
        assert type(mixed.evaluate_kernel()) is DenseLinearOperator


def test_an_evaluated_kernel_is_kept_and_its_matrix_is_refused():
    with without_room():
        lazy = RBFKernel().double()(points(N))
        assert lazy.evaluate_kernel() is lazy.evaluate_kernel()
        assert lazy.representation()[0] is lazy.evaluate_kernel().representation()[0]
        with pytest.raises(MemoryBudgetError, match=r"1100 x 1100.*9\.23 MiB.*AUTOKERN_MEMORY"):
            lazy.evaluate_kernel().to_dense()
