"""Single precision against the truth where distances lose digits: repeated points, far offsets, little noise."""

import functools

import gpytorch
import pytest
import torch
from gpytorch.kernels import AdditiveKernel, MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel
from support.models import ExactModel, points
from support.outcomes import outcome

import autokern
from autokern.core.registry import get
from autokern.kernels import tiles
from autokern.kernels import tree as trees
from autokern.kernels.matrix import Blocks

pytestmark = pytest.mark.usefixtures("enabled")
_STOCK = {"exact_log_prob": "stock", "kernel_matrix": "stock", "inv_quad_logdet": "stock"}
_WAYS = {
    "fused": {"exact_log_prob": "fused"},
    "gemm": {**_STOCK, "kernel_matrix": "gemm"},
    "tiled, potri": {**_STOCK, "kernel_matrix": "tiled", "inv_quad_logdet": "potri"},
}


_KERNELS = {
    "rbf": lambda d: ScaleKernel(RBFKernel(ard_num_dims=d)),
    "rbf-iso": lambda d: ScaleKernel(RBFKernel()),
    "matern12": lambda d: ScaleKernel(MaternKernel(0.5, ard_num_dims=d)),
    "matern32": lambda d: ScaleKernel(MaternKernel(1.5, ard_num_dims=d)),
    "matern52": lambda d: ScaleKernel(MaternKernel(2.5, ard_num_dims=d)),
    "sum": lambda d: ScaleKernel(AdditiveKernel(RBFKernel(), MaternKernel(1.5))),
}


def repeated(n, d, span, offset, seed):
    """Return points of which some stand there twice."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, generator=generator) * span
    x[-n // 5 :] = x[: n // 5]
    return x + offset, torch.sin(x.sum(-1)) + 0.1 * torch.randn(n, generator=generator)


def found(kernel, x, y, noise, dtype, way, x_wanted):
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-8))
    x, y = x.to(dtype).requires_grad_(x_wanted), y.to(dtype)
    model = ExactModel(x, y, kernel(x.shape[-1]), likelihood, gpytorch.means.ZeroMean()).to(dtype)
    likelihood.noise = noise
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    with autokern.using(force=way):
        loss = -mll(model(x), y)
        gradients = torch.autograd.grad(loss, [*model.parameters(), *([x] if x_wanted else [])])
    return [loss.detach().double(), *(g.double() for g in gradients)]


@functools.cache
def known(name, span, offset, seed):
    """Points, what is true of them, and how far stock's single precision is from it; the same for all ways."""
    x, y = repeated(120, 2, span, offset, seed)
    arguments = _KERNELS[name], x.clone(), y, 1e-3
    truth, stock = (found(*arguments, dtype, _STOCK, True) for dtype in (torch.float64, torch.float32))
    return x, y, truth, errors(stock, truth)


def errors(values, truth):
    return torch.tensor([((v - t).norm() / t.norm()).item() for v, t in zip(values, truth, strict=True)])


@pytest.mark.thin("name way", "span offset way")
@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize(("span", "offset"), [(1, 0), (6, 0), (6, 1e3), (30, 0), (300, 0), (300, 1e4)])
@pytest.mark.parametrize("name", _KERNELS)
def test_single_precision_is_no_further_from_the_truth_than_stock(name, span, offset, way):
    logs = []
    for seed in range(6):
        x, y, truth, of_stock = known(name, span, offset, seed)
        ours = errors(found(_KERNELS[name], x.clone(), y, 1e-3, torch.float32, _WAYS[way], True), truth)
        logs.append([e.clamp_min(3e-6 * (1 + span * 0.1)).log() for e in (ours, of_stock)])
    ours, stock = (torch.stack(column).mean(0) for column in zip(*logs, strict=True))
    assert (ours - stock).exp().max() <= 6  # few seeds; a factor of 100 where distances are not looked after


def trees_of(name, x):
    kernel = ScaleKernel(RQKernel()) if name == "rq" else _KERNELS[name](x.shape[-1])
    return kernel.requires_grad_(False), trees.read(kernel, x, trees.centre_of(x))


@pytest.mark.thin("candidate cross", "name")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "candidate",
    [
        pytest.param(c.name, marks=[pytest.mark.slow] * bool(c.compiles))
        for c in get("kernel_matmul").candidates
        if c.accuracy != "approximate"
    ],
)
@pytest.mark.parametrize("name", ["rbf", "matern12", "matern52", "rq"])
@pytest.mark.parametrize("cross", [False, True])
def test_products_of_far_points_are_no_further_from_the_truth_than_stock(name, candidate, cross):
    x, _ = repeated(90, 2, 300.0, 1e3, 2)
    x2 = x[:70].clone() if cross else x
    v = torch.randn(len(x2), 3, generator=torch.Generator().manual_seed(0))
    kernel, _ = trees_of(name, x)
    op = get("kernel_matmul")
    problem = op.problem_of(kernel, x, x2, v)
    reason = op[candidate].why_not(problem)
    if reason is not None:
        pytest.skip(reason)
    truth = kernel.double()(x.double(), x2.double()).to_dense() @ v.double()
    kernel.float()
    gap = (op[candidate].run(kernel, x, x2, v).double() - truth).abs().max()
    bound = (op.stock.run(kernel, x, x2, v).double() - truth).abs().max()
    assert gap <= 2 * bound + 2e-6


def test_near_points_stay_in_single_precision_and_far_ones_do_not():
    near, distant = torch.rand(30, 4), torch.rand(30, 4) * 100
    for x, dtype in ((near, torch.float32), (distant, torch.float64)):
        for of in ("rbf", "matern52"):
            tree = trees_of(of, x)[1]
            assert tiles.sides(tree, None).leaves[0].rows.dtype is dtype
            assert Blocks(tree)._leaves[0].z.dtype is dtype
    assert tiles.sides(trees_of("matern12", near)[1], None).leaves[0].rows.dtype is torch.float64
    assert Blocks(trees_of("rbf", distant)[1], look=False)._leaves[0].z.dtype is torch.float32


KINDS = [RBFKernel, MaternKernel, RQKernel, PeriodicKernel]


def pair(kernel, *points, forced="gemm"):
    found = []
    for candidate in (forced, "stock"):
        with torch.no_grad(), autokern.using(force={"kernel_matrix": candidate}):
            found.append(kernel(*points).to_dense())
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("away", [1e6, 1e12, float("nan")])
def test_sets_of_a_batch_have_centres_of_their_own(kind, away):
    x = points(4, 30)
    x[2:] += away
    found, expected = pair(kind().double(), x, points(20, seed=1))
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("odd", [1e8, 1e17, float("inf"), float("nan")])
@pytest.mark.parametrize("forced", ["gemm", "tiled"])
def test_an_odd_point_changes_no_other_row(odd, forced):
    x, y = (points(n, d=1, seed=n) for n in (90, 70))
    x[5] = odd
    others = torch.arange(90) != 5
    found, expected = pair(PeriodicKernel().double(), x, y, forced=forced)
    torch.testing.assert_close(found[others], expected[others], rtol=0, atol=1e-12)
    assert torch.equal(found[5].isnan(), expected[5].isnan())


def test_short_lengthscales_of_a_periodic_kernel():
    kernel = PeriodicKernel().double()
    kernel.lengthscale, kernel.period_length = 1e-4, 50.0
    x = points(60, d=1)
    found, expected = pair(kernel, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [*KINDS, lambda: ScaleKernel(RQKernel())])
def test_arguments_by_position_and_points_in_one_dimension(kind):
    kernel, x = kind(), torch.rand(5, 1, generator=torch.Generator().manual_seed(4))
    for args in ((x, x, False), (x, x, True), (x, x, False, False), (x, x, True, False), (x[:, 0], x[:, 0])):
        autokern.disable()
        expected, _ = outcome(kernel.forward, *args)
        autokern.enable()
        found, _ = outcome(kernel.forward, *args)
        if isinstance(expected, tuple):
            assert found[0] is expected[0]
        else:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_distances_that_an_instance_redefines(kind):
    kernel = kind().double()
    stock = kernel.covar_dist
    kernel.covar_dist = lambda *args, **kwargs: 2 * stock(*args, **kwargs)
    x, y = (points(n, seed=n) for n in (12, 9))
    found, expected = pair(kernel, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("far", [1e6, 1e9, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("op", ["kernel_matrix=gemm", "kernel_matrix=tiled", "kernel_matmul=tiled"])
def test_a_point_far_away_rounds_only_its_own_distances(op, dtype, far):
    """Of the kernel whose slope at zero is not finite, which rounds small distances to zero."""
    if "matmul" in op and far > 1e9:
        pytest.skip("a product has the infinite point in all its rows")
    z, x = torch.rand(2, 70, 2, dtype=dtype, generator=torch.Generator().manual_seed(1))
    x = torch.cat((x, x.new_full((1, 2), far)))
    kernel, weights = MaternKernel(0.5).to(dtype), torch.eye(71, dtype=dtype)[:, :70]

    def read(order, x, weights):
        with autokern.using(force=order), torch.no_grad():
            return kernel(z, x) @ weights if "matmul" in op else kernel(z, x).to_dense()[:, :70]

    theirs = read({"kernel_matrix": "stock", "kernel_matmul": "stock"}, x[:70], weights[:70])
    tolerance = 1e-6 if dtype is torch.float64 else 1e-3
    torch.testing.assert_close(read(dict([op.split("=")]), x, weights), theirs, rtol=0.0, atol=tolerance)
