"""Sums of dense and linear kernels, whose roots wait until they are read; small Toeplitz matrices, multiplied whole."""

import copy
import pickle
import sys
import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, PolynomialKernel, RBFKernel, ScaleKernel
from gpytorch.means import LinearMean
from linear_operator import operators
from linear_operator.operators import (
    DenseLinearOperator,
    LinearOperator,
    RootLinearOperator,
    interpolated_linear_operator,
)
from linear_operator.utils import toeplitz
from linear_operator.utils.warnings import NumericalWarning
from support.models import ExactModel, points, step
from support.outcomes import as_stock, assert_close, both, outcome

import autokern
from autokern.core.replay.recording import Recorder
from autokern.hooks import linear_operator as hooks
from autokern.hooks.linear_operator import _Roots
from autokern.model import memoized

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning"),
]


def test_a_product_of_an_operator_with_itself_decomposes_it_once():
    lazy = gpytorch.kernels.IndexKernel(num_tasks=3, rank=2)(torch.arange(40).remainder(3).unsqueeze(-1))
    with autokern.enabled():
        product = lazy * lazy
        assert product.left_linear_op is product.right_linear_op


def test_a_system_without_gradients_is_factorised_once_for_all_calls():
    system = DenseLinearOperator(2.0 * torch.eye(5, dtype=torch.float64)).add_jitter(0.5)
    rhs = torch.rand(5, 1, dtype=torch.float64)
    with autokern.enabled():
        found = [torch.stack(system.inv_quad_logdet(rhs, logdet=True)) for _ in range(2)]
    assert "cholesky" in memoized.names(system)
    assert torch.equal(*found)
    told = [str(autokern.explain("inv_quad_logdet", n=300, grad=grad)) for grad in ("", "a")]
    assert ["caches the factor" in one for one in told] == [True, False]


def trend():
    return ScaleKernel(RBFKernel()) + ScaleKernel(LinearKernel(active_dims=[0]))


KERNELS = {
    "trend": trend,
    "trend first": lambda: LinearKernel() + ScaleKernel(MaternKernel(1.5)),
    "two trends": lambda: trend() + LinearKernel(active_dims=[1]),
    "in a scale": lambda: ScaleKernel(RBFKernel() + LinearKernel()),
    "a polynomial": lambda: ScaleKernel(PolynomialKernel(2)) + RBFKernel() + LinearKernel(),
}
each_kernel = pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)


def regression(x, make):
    torch.manual_seed(0)
    return ExactModel(x, (2 * x).sum(-1).sin(), make(), mean=LinearMean(2)).to(x)


def close(found, wanted, bound=1e-9):
    assert_close(list(found), list(wanted), rtol=bound, atol=bound)


@pytest.fixture
def updates(monkeypatch):
    """How often the roots of a sum were updated."""
    count, ours = [], _Roots.__getitem__

    def read(self, key):
        count.extend([key] if dict.get(self, key) is None else [])
        return ours(self, key)

    monkeypatch.setattr(_Roots, "__getitem__", read)
    return count


@each_kernel
@pytest.mark.parametrize("n", [1, 2, 3, 20])
def test_roots_samples_and_their_gradients_are_those_of_stock(make, n):
    def work():
        kernel = make().double()
        k = kernel(3 * points(n)).evaluate_kernel()
        root, inverse = k.root_decomposition().to_dense(), k.root_inv_decomposition().to_dense()
        gradients = torch.autograd.grad(root.sin().sum(), list(kernel.parameters()), allow_unused=True)
        torch.manual_seed(1)
        prior = gpytorch.distributions.MultivariateNormal(torch.zeros(n, dtype=torch.float64), kernel(3 * points(n)))
        draws = prior.rsample(torch.Size([3]))
        kept = sorted(key[0] for key in k.__dict__.get("_memoize_cache", ()))
        return type(k), kept, (root, inverse, draws), gradients

    (*kept, values, slopes), (*our_kept, our_values, our_slopes) = both(work)
    assert our_kept == kept
    close(our_values, values)
    close(our_slopes, slopes, 1e-7)


@as_stock()
def test_copies_pickles_and_grown_matrices_have_the_roots():
    with torch.no_grad():
        k = trend().double()(3 * points(12)).evaluate_kernel()
        row, corner = torch.full((1, 12), 0.1, dtype=torch.float64), torch.full((1, 1), 9.0, dtype=torch.float64)
        copies = copy.deepcopy(k), pickle.loads(pickle.dumps(k)), k.cat_rows(row, corner)
        return [c.root_decomposition().root.to_dense() for c in copies]


def test_the_library_reads_and_pops_roots():
    with autokern.enabled():
        caches = [trend().double()(3 * points(9)).evaluate_kernel().__dict__["_memoize_cache"] for _ in range(2)]
        key = next(iter(caches[0]))
        assert all(type(cache) is _Roots and len(cache) == 2 for cache in caches)
        assert type(caches[0][key]) is type(caches[1].pop(key)) is RootLinearOperator
    assert len(caches[1]) == 1
    assert caches[0].pop("nothing", 3) == 3


@each_kernel
@pytest.mark.parametrize("n", [40, 90])
def test_steps_and_predictions_read_no_root(make, n, updates):
    stock_updates, stock = [], LinearOperator.add_low_rank.__code__

    def called(frame, event, argument):
        if event == "call" and frame.f_code is stock:
            stock_updates.append(frame.f_locals["generate_roots"])

    with autokern.enabled():
        model = regression(3 * points(n), make)
        sys.setprofile(called)
        try:
            with autokern.using(force={"objective": "stock", "exact_log_prob": "stock"}):
                step(model)
            model.eval()
            with torch.no_grad():
                found = model(3 * points(7, seed=1))
                found.variance, found.covariance_matrix
        finally:
            sys.setprofile(None)
    assert not updates
    assert not any(stock_updates)


def test_a_sum_whose_noiseless_matrix_has_no_factor_is_served_without_the_warnings_of_a_root():
    x = 3 * points(60)
    x[30:] = x[:30]

    def work():
        model = regression(x, trend).eval()
        model.covar_module.kernels[0].base_kernel.lengthscale = 30.0
        with torch.no_grad(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", NumericalWarning)
            found = model(3 * points(4, seed=1))
        return len(told), (found.mean, found.variance)

    (theirs, stock), (told, ours) = both(work)
    assert theirs
    assert not told
    close(ours, stock, 1e-6)


def test_what_is_asked_otherwise_or_holds_other_operators_is_stocks():
    with autokern.enabled():
        dense = DenseLinearOperator(torch.eye(4, dtype=torch.float64) * 2)
        thin = torch.ones(4, 1, dtype=torch.float64)
        asked = dense.add_low_rank(thin, generate_roots=False)
        kept = DenseLinearOperator(torch.eye(4, dtype=torch.float64))
        kept.root_decomposition()
        lazy = RBFKernel().double()(points(4)) + RootLinearOperator(thin)
        with torch.autocast("cpu"):
            lowered = dense + RootLinearOperator(thin)
        some = DenseLinearOperator(RBFKernel().double()(points(4)).to_dense())
        with gpytorch.settings.max_cholesky_size(0):
            ordered = some + RootLinearOperator(thin)
        others = asked, kept + RootLinearOperator(thin), lazy, lowered, ordered
        assert not any(type(o.__dict__.get("_memoize_cache")) is _Roots for o in others)


@pytest.mark.parametrize("written", [0, 1])
@as_stock()
def test_roots_of_the_programs_own_tensors_are_of_the_time_of_the_sum(written):
    tensors = torch.eye(4, dtype=torch.float64) * 2, torch.ones(4, 1, dtype=torch.float64)
    total = DenseLinearOperator(tensors[0]) + RootLinearOperator(tensors[1])
    tensors[written].mul_(3.0)
    return total.root_decomposition().to_dense(), total.root_inv_decomposition().to_dense()


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
    ("column", "row", "right"),
    [
        (torch.rand(3, 5), None, torch.rand(3, 5, 2)),
        (torch.rand(hooks._FEW + 1), None, torch.rand(hooks._FEW + 1, 2)),
        (torch.rand(5), None, torch.rand(5, 2).double()),
        (torch.ones(4), torch.arange(1.0, 5.0), torch.rand(4, 2)),
        (torch.rand(5), None, torch.rand(4, 2)),
        (torch.rand(5), None, torch.rand(5, 2).to_sparse()),
    ],
    ids=["a batch of matrices", "many rows", "another dtype", "not symmetric", "too few rows", "sparse"],
)
def test_other_products_are_the_library_s_own_and_so_are_its_errors(column, row, right, transforms):
    row = column if row is None else row
    ours = outcome(toeplitz.toeplitz_matmul, column, row, right)
    assert transforms or isinstance(ours[0], tuple)
    assert_close(ours, outcome(FFT, column, row, right), rtol=0, atol=0)


INDICES = torch.randint(0, 6, (7, 2), generator=torch.Generator().manual_seed(0))
WEIGHTS, RIGHT = torch.rand(7, 2, dtype=torch.float64), torch.rand(3, 7, 2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("indices", "right"),
    [(INDICES, RIGHT), (INDICES, RIGHT[0]), (INDICES, RIGHT.float()), (INDICES.int(), RIGHT), (INDICES.double(), RIGHT),
     (INDICES, RIGHT[:, :1]), (INDICES + 6, RIGHT), (INDICES - 6, RIGHT), (INDICES, RIGHT[0, :, 0]),
     (INDICES[:0], RIGHT[:, :0]), (INDICES[:, :1], RIGHT), (INDICES.expand(3, 7, 2), RIGHT)],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_rows_with_the_same_index_are_added_up_bit_for_bit(indices, right):
    def run():
        at = [WEIGHTS.clone().requires_grad_(), right.clone().requires_grad_()]
        value = interpolated_linear_operator.left_t_interp(indices, *at, 6)
        return value.detach(), *torch.autograd.grad(value.sin().sum(), at)

    def found():
        values = outcome(run)[0]
        return values if isinstance(values[0], type) else tuple(t.tolist() for t in values)

    expected = found()
    with autokern.enabled():
        assert found() == expected


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("columns", [(), (1,), (4,)])
@pytest.mark.parametrize("first", [0.5, torch.inf])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:TypedStorage", "ignore:torch.sparse.SparseTensor")
def test_products_of_interpolated_operators_are_recorded(batch, columns, first):
    """Without sparse matrices, which no recording takes; weights that are zero are left out, as in those."""
    base = torch.rand(*batch, 6, 6, dtype=torch.float64)
    left, right = (INDICES.expand(*batch, 7, 2), INDICES.flip(0)[:5].expand(*batch, 5, 2))
    weights = WEIGHTS.expand(*batch, 7, 2).clone(), WEIGHTS[:5].expand(*batch, 5, 2) * torch.tensor([1.0, 0.0])
    rhs, other = (torch.rand(*batch, n, *columns, dtype=torch.float64) for n in (5, 7))
    if batch and not columns:
        rhs, other = rhs[0], other[0]
    rhs.view(-1)[0] = first

    def compute():
        operator = operators.InterpolatedLinearOperator(base, left, weights[0], right, weights[1])
        both = operator._matmul(rhs), operator._t_matmul(other)
        slopes = operator._bilinear_derivative(other, rhs) if columns else ()
        return [*both, *(t for t in slopes if t.is_floating_point())]

    with autokern.enabled():
        recorder = Recorder(base)
        with recorder:
            found = compute()
        replay = recorder.replay(*found)
        base.square_()
        replay.run()
    torch.testing.assert_close(found, compute(), rtol=1e-12, atol=1e-12, equal_nan=True)
