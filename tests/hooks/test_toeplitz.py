"""Products with small Toeplitz matrices by the matrix itself: the numbers and gradients of exact arithmetic."""

import gpytorch
import pytest
import torch
from linear_operator.operators import ToeplitzLinearOperator
from linear_operator.utils import toeplitz
from support.outcomes import assert_close

import autokern
from autokern.hooks import linear_operator as hooks

FFT = hooks._toeplitz_matmul.__wrapped__


@pytest.fixture
def transforms(monkeypatch):
    """The Fourier transforms of the library."""
    calls, transform = [], toeplitz.fft
    monkeypatch.setattr(toeplitz, "fft", lambda *args: calls.append(args) or transform(*args))
    with autokern.enabled():
        yield calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (20, 30), (2, 5, 4), (3, 2, 33, 6)])
def test_values_and_gradients_to_second_order_are_the_library_s(shape, dtype, transforms):
    column, right = torch.rand(shape[-2], dtype=dtype), torch.rand(shape, dtype=dtype)

    def all_of(multiply):
        at = [t.clone().requires_grad_() for t in (column, right)]
        value = multiply(at[0], at[1])
        slopes = torch.autograd.grad(value.sin().sum(), at, create_graph=True)
        return value, *slopes, *torch.autograd.grad(sum(s.square().sum() for s in slopes), at)

    ours = all_of(toeplitz.sym_toeplitz_matmul)
    assert not transforms
    near = 1e-4 if dtype is torch.float32 else 1e-12
    for one, other in zip(ours, all_of(lambda c, t: FFT(c, c, t)), strict=True):
        assert one.dtype == other.dtype
        assert_close(one, other, rtol=0, atol=near * other.abs().max().item())


@pytest.mark.parametrize(
    ("column", "right"),
    [
        (torch.rand(3, 5), torch.rand(3, 5, 2)),
        (torch.rand(hooks._FEW + 1), torch.rand(hooks._FEW + 1, 2)),
        (torch.rand(5), torch.rand(5, 2).double()),
    ],
    ids=["a batch of matrices", "many rows", "another dtype"],
)
def test_other_products_are_the_library_s_own(column, right, transforms):
    ours = toeplitz.sym_toeplitz_matmul(column, right)
    assert transforms
    assert torch.equal(ours, FFT(column, column, right))


def test_a_matrix_that_is_not_symmetric_is_multiplied_by_the_library(transforms):
    toeplitz.toeplitz_matmul(torch.ones(4), torch.ones(4), torch.rand(4, 2))
    assert transforms


@pytest.mark.parametrize("right", [torch.rand(4, 2), torch.rand(5, 2).to_sparse()])
def test_what_the_library_refuses_raises_its_error(right):
    def error():
        with pytest.raises(RuntimeError, match=r"Incompatible dimensions|expand is unsupported") as found:
            toeplitz.sym_toeplitz_matmul(torch.rand(5), right)
        return str(found.value)

    theirs = error()
    with autokern.enabled():
        assert error() == theirs


def test_a_model_on_a_grid_gets_the_library_s_loss_and_gradients():
    torch.manual_seed(0)
    x, y = torch.rand(40, 2).double(), torch.rand(40).double()

    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module, base = gpytorch.means.ConstantMean(), gpytorch.kernels.RBFKernel(ard_num_dims=2)
            self.covar_module = gpytorch.kernels.GridInterpolationKernel(base, grid_size=8, num_dims=2)

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def loss():
        model = Model().double()
        found = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)(model(x), y)
        return found, *torch.autograd.grad(found, list(model.parameters()))

    theirs = loss()
    with autokern.enabled():
        assert_close(loss(), theirs, rtol=1e-9, atol=1e-10)


def test_a_vector_by_the_operator_is_a_column_of_the_matrix():
    operator = ToeplitzLinearOperator(torch.rand(6).double())
    with autokern.enabled():
        assert_close(operator @ torch.eye(6).double(), operator.to_dense(), rtol=1e-12, atol=1e-12)
