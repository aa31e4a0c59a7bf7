"""Samples from base samples: the library's own values, gradients and errors."""

import pytest
import torch
from botorch.models import ModelListGP
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator.operators import DenseLinearOperator, LinearOperator, to_linear_operator
from linear_operator.utils.warnings import NumericalWarning
from support.botorch_models import of_tasks, single
from support.outcomes import assert_close, both

import autokern
from autokern.hooks import posterior as samples

pytestmark = pytest.mark.filterwarnings("ignore:Data")


MODELS = {
    "one output": single(),
    "one output, as it is": single(outcome_transform=None),
    "two outputs": single(2),
    "two models": lambda: ModelListGP(single()(), single(n=9)()),
    "two tasks": of_tasks((0, 1)),
}


def drawn(model, x):
    """Samples, and their gradient by the points."""
    x = x.clone().requires_grad_()
    found = SobolQMCNormalSampler(torch.Size([6]), seed=1)(model.posterior(x))
    return found, torch.autograd.grad(found.sin().sum(), x)[0]


@pytest.fixture
def served(monkeypatch):
    """How often samples were computed here."""
    count, ours = [], samples._drawn

    def counted(*args):
        found = ours(*args)
        count.append(found is not None)
        return found

    monkeypatch.setattr(samples, "_drawn", counted)
    return count


@pytest.mark.parametrize("shape", [(1, 3), (4, 3), (2, 1, 3), (2, 4, 3), (2, 2, 3, 3)])
@pytest.mark.parametrize("name", MODELS)
def test_samples_of_posteriors(name, shape, served):
    x = torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert_close(*reversed(both(lambda: drawn(MODELS[name]().eval(), x))), rtol=1e-7)
    assert any(served)


def matrix(*batch, n=4, dtype=torch.float64):
    a = torch.randn(*batch, n, n, dtype=dtype, generator=torch.Generator().manual_seed(n))
    return a @ a.mT + torch.eye(n, dtype=dtype)


def agree(make, base):
    """What stock and autokern draw from a distribution that is made twice is exactly the same."""
    expected, found = both(lambda: make().rsample(base_samples=base))
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("n", [2, 4, 7, 30])
def test_samples_of_dense_covariances_are_the_librarys_to_the_bit(n, batch, dtype, served):
    covariance, mean = matrix(*batch, n=n, dtype=dtype), torch.ones(*batch, n, dtype=dtype)
    for draws in ((20,), (2, 3)):
        agree(
            lambda: MultivariateNormal(mean, DenseLinearOperator(covariance)), torch.randn(*draws, *batch, n).to(mean)
        )
    assert served == [True] * 2


def test_what_is_not_formed_here_is_stocks():
    base = torch.randn(5, 4, dtype=torch.float64)
    mean = torch.zeros(4, dtype=torch.float64)
    agree(lambda: MultivariateNormal(mean, matrix()), base)  # a tensor
    agree(lambda: MultivariateNormal(mean, DenseLinearOperator(matrix()).add_jitter(0.1)), base)
    agree(lambda: MultivariateNormal(mean.expand(3, 4), DenseLinearOperator(matrix())), torch.randn(5, 3, 4).double())
    interleaved = to_linear_operator(matrix(n=8))
    agree(lambda: MultitaskMultivariateNormal(torch.zeros(4, 2).double(), interleaved), torch.randn(5, 4, 2).double())
    with autokern.enabled(), pytest.raises(RuntimeError):
        MultivariateNormal(mean, DenseLinearOperator(matrix())).rsample(base_samples=torch.randn(5, 9).double())


def test_matrices_without_a_factor_are_told_of_by_the_library():
    bad = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
    for context in (autokern.enabled, pytest.MonkeyPatch.context):
        with context(), pytest.warns(NumericalWarning):
            found = MultivariateNormal(torch.zeros(2).double(), DenseLinearOperator(bad)).rsample(
                base_samples=torch.ones(1, 2).double()
            )
        torch.testing.assert_close(found.abs(), torch.tensor([[1.0, 0.0]]).double())


def test_arguments_are_those_of_the_library(served):
    mean, base = torch.zeros(4).double(), torch.randn(3, 4).double()

    class Wrapped(MultivariateNormal):
        def rsample(self, sample_shape=None, base_samples=None):
            return super().rsample(sample_shape or torch.Size(), base_samples)

    with autokern.enabled():
        MultivariateNormal(mean, DenseLinearOperator(matrix())).rsample(torch.Size([3]), base)
        assert served == [True]
        assert Wrapped(mean, DenseLinearOperator(matrix())).sample(torch.Size([3])).shape == (3, 4)
        for wrong in ({"foo": 1}, {"sample_shape": 2, "base": 1}):
            with pytest.raises(TypeError):
                MultivariateNormal(mean, DenseLinearOperator(matrix())).rsample(base_samples=base, **wrong)


def test_what_the_user_puts_in_place_is_obeyed(monkeypatch, served):
    base = torch.ones(1, 4).double()
    for name in ("covariance", "root", "factor"):
        covariance = DenseLinearOperator(matrix())
        distribution = MultivariateNormal(torch.zeros(4).double(), covariance)
        with monkeypatch.context() as patch, autokern.enabled():
            if name == "covariance":
                distribution.lazy_covariance_matrix = DenseLinearOperator(4 * matrix())
            elif name == "root":
                covariance.root_decomposition = DenseLinearOperator(4 * matrix()).root_decomposition
            else:
                double = lambda a, **_: 2 * torch.linalg.cholesky(a)  # noqa: E731
                patch.setattr("linear_operator.operators._linear_operator.psd_safe_cholesky", double)
            found = distribution.rsample(base_samples=base)
        plain = MultivariateNormal(torch.zeros(4).double(), DenseLinearOperator(matrix())).rsample(base_samples=base)
        torch.testing.assert_close(found, 2 * plain)
    assert served == [True, False]  # the patched factor is not known, so the hook is not run


def test_a_patched_derivative_of_the_root_is_obeyed(monkeypatch, served):
    """Found by T14 in one of eight runs: the gradient by the root is the operators' own."""
    stock = LinearOperator._bilinear_derivative
    monkeypatch.setattr(
        LinearOperator,
        "_bilinear_derivative",
        lambda self, *of: tuple(None if g is None else 2 * g for g in stock(self, *of)),
    )
    covariance = torch.eye(3, dtype=torch.float64) + 0.5
    base = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def slope():
        k = covariance.clone().requires_grad_()
        found = MultivariateNormal(k.new_zeros(3), DenseLinearOperator(k)).rsample(torch.Size([4]), base_samples=base)
        return torch.autograd.grad(found.sin().sum(), k)[0]

    assert_close(*reversed(both(slope)), rtol=0, atol=1e-12)
    assert not any(served)
