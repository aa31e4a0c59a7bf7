"""RowBlocks, inverse factors and what they solve, their growth by new data, and how strategies keep them."""

import functools
import gc
import threading
import weakref

import gpytorch
import pytest
import torch
from gpytorch.kernels import LinearKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.exact_models import Mine
from support.models import ExactModel
from support.threads import in_threads
from support.tiling import random

import autokern
from autokern.density.matrices import solved
from autokern.prediction import factor_cache, inverse_factor
from autokern.prediction.inverse_factor import Conditioned, RowBlocks

pytestmark = pytest.mark.usefixtures("one_thread")
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
often = hypothesis_settings(max_examples=40, deadline=None)
attached = gpytorch.settings.detach_test_caches(False)


def lower(n, batch=(), seed=0):
    return (random(*batch, n, n, seed=seed) / n**0.5).tril(-1) + 2 * torch.eye(n, dtype=torch.float64)


def new_rows(n, q, batch=(), seed=0):
    return random(*batch, q, n + q, seed=seed).tril(n)


def grown(matrix, rows):
    """The dense matrix with rows appended."""
    return torch.cat((torch.nn.functional.pad(matrix, (0, rows.shape[-2])), rows), dim=-2)


@often
@given(births=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 30)), max_size=12))
def test_no_child_writes_into_another_of_the_family(births):
    """Whatever the family tree, all members keep their values bit for bit."""
    family = [(RowBlocks(lower(20)), lower(20))]
    for seed, (parent, q) in enumerate(births):
        blocks, matrix = family[parent % len(family)]
        rows = new_rows(blocks.n, q, seed=seed)
        family.append((blocks.appended(rows), grown(matrix, rows)))
    for blocks, matrix in family:
        assert torch.equal(blocks.dense(), matrix)


def memories(blocks):
    return [piece.untyped_storage().data_ptr() for _, _, piece in blocks._pieces()]


def test_what_is_there_is_shared_and_the_second_child_has_rows_of_its_own():
    parent = RowBlocks(lower(300))
    first, second = parent.appended(new_rows(300, 2)), parent.appended(new_rows(300, 2, seed=1))
    grandchild = first.appended(new_rows(302, 3))
    assert memories(parent)[0] == memories(first)[0] == memories(second)[0] == memories(grandchild)[0]
    assert memories(first)[-1] == memories(grandchild)[-1] != memories(second)[-1]
    for seed in range(200):
        grandchild = grandchild.appended(new_rows(grandchild.n, 1, seed=seed))
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for _, _, p in grandchild._pieces()}
    assert sum(storages.values()) < 1.5 * grandchild.n**2 * 8


def test_threads_that_append_to_one_parent_do_not_share_rows():
    parent = RowBlocks(lower(20)).appended(new_rows(20, 1))
    children, rows = {}, [new_rows(21, 1, seed=k) for k in range(16)]
    barrier = threading.Barrier(16)

    def append(k):
        barrier.wait()
        children[k] = parent.appended(rows[k])

    in_threads(append, range(16))
    for k, child in children.items():
        assert torch.equal(child.dense()[20:], grown(parent.dense(), rows[k])[20:])


@pytest.mark.parametrize("product", ["right_transposed", "right"])
def test_a_graph_of_the_parent_survives_rows_of_children(product, monkeypatch):
    for name, few in (("_ROWS", 4), ("_SPARE", 3)):  # so that small matrices have several blocks
        monkeypatch.setattr(inverse_factor, name, few)
    for parent in (RowBlocks(lower(3)), RowBlocks(lower(9)), RowBlocks(lower(9)).appended(new_rows(9, 1))):
        dense, b = parent.dense().clone(), random(2, parent.n).requires_grad_()
        out = getattr(parent, product)(b)
        for child in (parent.appended(new_rows(parent.n, 1)), parent.appended(new_rows(parent.n, 2))):
            child.appended(new_rows(child.n, 1))
        matrix = dense.mT if product == "right_transposed" else dense
        close(torch.autograd.grad(out.square().sum(), b)[0], 2 * b @ matrix @ matrix.mT)


def substitution(matrix):
    factor = torch.linalg.cholesky(matrix)
    return lambda rhs: torch.cholesky_solve(rhs, factor)


@pytest.mark.parametrize(("batch", "lead"), [((), ()), ((2,), (2,)), ((), (3,)), ((2,), ()), ((2,), (3, 1))], ids=str)
def test_solved_and_its_derivatives(batch, lead):
    root, rhs = random(*batch, 4, 4).requires_grad_(), random(*lead, 4, 2, seed=1).requires_grad_()

    def of(root, rhs):
        matrix = root @ root.mT + torch.eye(4, dtype=torch.float64)
        return solved(matrix, substitution(matrix), rhs)

    close(of(root, rhs), torch.linalg.solve(root @ root.mT + torch.eye(4).double(), rhs))
    assert torch.autograd.gradcheck(of, (root, rhs))
    assert torch.autograd.gradgradcheck(of, (root, rhs))
    for wanted in ([root], [rhs]):
        cut = [t if t in set(wanted) else t.detach() for t in (root, rhs)]
        close(torch.autograd.grad(of(*cut).sum(), wanted), torch.autograd.grad(of(root, rhs).sum(), wanted))
    matrix = (root @ root.mT + torch.eye(4).double()).detach()
    factor = torch.linalg.cholesky(matrix).requires_grad_()
    assert not solved(matrix, lambda b: torch.cholesky_solve(b, factor), rhs.detach()).requires_grad


def covariance(x, z=None, scale=1.0):
    z = x if z is None else z
    return scale * (-(x.unsqueeze(-2) - z.unsqueeze(-3)).square().sum(-1)).exp()


def noisy(x, noise=0.05, scale=1.0):
    return covariance(x, scale=scale) + scale * noise * torch.eye(x.shape[-2], dtype=x.dtype)


def points(*shape, seed=0, dtype=torch.float64):
    return (2 * torch.rand(*shape, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def conditioned(x, *scales):
    return Conditioned(torch.linalg.cholesky(noisy(x, *scales)), residual=x.sum(-1).sin())


def assert_knows(known, k, residual):
    """All answers are those of the dense noisy covariance `k`."""
    rows, inverse = covariance(points(6, seed=7), points(k.shape[-1], seed=8)), torch.linalg.inv(k)
    truth, white = rows @ inverse @ rows.mT, known.whitened(rows)
    assert known.n == k.shape[-1]
    close(known.alpha, (inverse @ residual.unsqueeze(-1)).squeeze(-1))
    close(white @ white.mT, truth)
    close(known.explained(rows), truth.diagonal(dim1=-2, dim2=-1))
    close(known.explained_covariance(rows), truth)
    close(known.root @ known.root.mT, inverse)


def extended(known, x, new, *scales):
    cross = covariance(new, x, *scales[1:])
    return known.extended(cross, noisy(new, *scales), new.sum(-1).sin())


def joined(x, new):
    lead = torch.broadcast_shapes(x.shape[:-2], new.shape[:-2])
    return torch.cat((x.expand(*lead, -1, -1), new.expand(*lead, -1, -1)), dim=-2)


def test_detached_is_the_same_without_gradients():
    x, new = points(12), points(2, seed=1).requires_grad_()
    plain = conditioned(x)
    assert plain.detached() is plain
    child = extended(plain, x, new)
    assert child.requires_grad
    assert child.detached() is child.detached()
    assert child.detached().inverse is child.inverse
    k = noisy(x.clone().requires_grad_())
    whole = Conditioned(torch.linalg.cholesky(k), matrix=k, residual=x.sum(-1).sin())
    whole.inverse, whole.alpha
    for known, everything in ((child.detached(), joined(x, new.detach())), (whole.detached(), x)):
        assert not known.requires_grad
        assert_knows(known, noisy(everything), everything.sum(-1).sin())
        assert not extended(known, everything, points(1, seed=5)).requires_grad


TINY = [(torch.float64, 1e-10), (torch.float64, 3e-10), (torch.float32, 1e-5), (torch.float32, 1e-6)]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize(("dtype", "noise"), TINY, ids=str)
def test_duplicates_under_tiny_noise_are_not_appended(dtype, noise, scale):
    x, other = points(10, dtype=dtype), points(1, seed=4, dtype=dtype)
    known = conditioned(x, noise, scale)
    assert extended(known, x, x[:1], noise, scale) is None
    assert extended(known, x, torch.cat((other, x[:1])), noise, scale) is None
    assert extended(known, x, other.expand(2, 3), noise, scale) is None
    assert extended(known, x, torch.stack((other, x[:1])), noise, scale) is None
    assert extended(known, x, other, 0.1, scale) is not None


def model_of(x, y, kernel=None, noise=0.05, likelihood=None):
    given = likelihood or GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-20))
    if likelihood is None:
        given.noise_covar.noise = noise
    return ExactModel(x, y, kernel, given).to(x).eval()


def regression(n=30, dtype=torch.float64, **options):
    x = points(n, dtype=dtype)
    return model_of(x, x.sum(-1).sin(), **options)


@pytest.mark.thin("scale", "dtype noise")
@pytest.mark.parametrize("scale", [0.1, 1.0, 1e4])
@pytest.mark.parametrize(("dtype", "noise"), TINY, ids=str)
def test_a_model_with_duplicates_is_as_accurate_as_a_refit(dtype, noise, scale):
    def of(dtype, refit):
        x, at = points(10, dtype=dtype), points(7, seed=9, dtype=dtype)
        model, values = model_of(x, x.sum(-1).sin(), noise=noise * scale), x[:2].sum(-1).sin()
        model.covar_module.outputscale = scale
        model(at)
        if refit:
            model.set_train_data(torch.cat((x, x[:2])), torch.cat((model.train_targets, values)), strict=False)
        else:
            model = model.get_fantasy_model(x[:2], values)
        return model(at).mean.double(), model(at).covariance_matrix.double()

    with torch.no_grad():
        truth, refit = of(torch.float64, True), of(dtype, True)
        with autokern.enabled():
            found = of(dtype, False)
    for ours, theirs, true in zip(found, refit, truth, strict=True):
        unit = true.abs().max() * (1e-9 if dtype == torch.float64 else 1e-5)
        assert (ours - true).abs().max() <= 3 * (theirs - true).abs().max() + unit


def strategy(model):
    model(points(3, seed=5))
    return model.prediction_strategy


def test_one_factor_is_found_again_and_gradients_are_kept_apart():
    with autokern.enabled():
        kept = strategy(regression())
        cut = factor_cache.of(kept)
        assert factor_cache.of(kept) is factor_cache.found(kept) is cut
        assert_knows(cut, kept.lik_train_train_covar.to_dense().detach(), kept.train_labels.clone())
        with attached:
            assert factor_cache.found(kept) is None
            whole = factor_cache.of(kept)
            assert whole.requires_grad
            assert factor_cache.of(kept) is whole
        assert factor_cache.of(kept) is cut
        whole.alpha.sum().backward()
        with attached:
            assert factor_cache.found(kept) is None
        assert factor_cache.of(kept) is cut


PLAIN = {
    "rbf": (lambda: None, True),
    "mine": (Mine, True),
    "product": (lambda: ScaleKernel(RBFKernel() * PeriodicKernel()), None),
    "linear": (LinearKernel, False),
    "linear and rbf": (lambda: ScaleKernel(LinearKernel()) + RBFKernel(), True),
    "rbf and linear": (lambda: RBFKernel() + ScaleKernel(LinearKernel()), True),
    "a scaled sum": (lambda: ScaleKernel(RBFKernel() + LinearKernel()), True),
}


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("make", "expected"), PLAIN.values(), ids=PLAIN)
def test_what_is_plain_has_a_factor(make, expected, fixed):
    likelihood = FixedNoiseGaussianLikelihood(torch.full((30,), 0.1).double()) if fixed else None
    kept = strategy(regression(kernel=make(), likelihood=likelihood))
    assert factor_cache.plain(kept) is (factor_cache.of(kept) is not None)
    assert expected is None or factor_cache.plain(kept) is expected


class Standardized(ExactModel):
    """A model whose `forward` standardises all points together, as tutorials of deep kernels do."""

    def forward(self, x):
        return super().forward((x - x.mean(-2, keepdim=True)) / x.std(-2, keepdim=True))


@pytest.mark.parametrize("targets", [random(3), random(2, 3)], ids=["one", "several"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.float64, 1e-9)], ids=str)
def test_a_fantasy_whose_points_move_the_others_is_a_refit(targets, dtype, bound):
    x, new, at = points(17, dtype=dtype), points(3, seed=3, dtype=dtype), points(5, seed=4, dtype=dtype)
    made = Standardized(x, x.sum(-1).sin()).to(dtype).eval()
    everything = torch.cat([x, new]), torch.cat([x.sum(-1).sin().expand(*targets.shape[:-1], 17), targets.to(x)], -1)
    expected = Standardized(everything[0].expand(*everything[1].shape, -1), everything[1]).to(dtype).eval()(at)
    with autokern.enabled(), torch.no_grad():
        made(at)
        found = made.get_fantasy_model(new, targets.to(x))(at)
        torch.testing.assert_close(found.mean, expected.mean, rtol=bound, atol=bound)
        torch.testing.assert_close(found.variance, expected.variance, rtol=bound, atol=bound)


@pytest.mark.parametrize("detached", [True, False])
def test_nothing_is_kept_of_a_strategy_that_is_dropped(detached):
    with autokern.enabled(), gpytorch.settings.detach_test_caches(detached):
        model = regression()
        model(points(3))
        models = [model, *(model.get_fantasy_model(points(2, seed=3), random(2)) for _ in range(3))]
        models[1](points(3)).variance
        watched = [weakref.ref(m.prediction_strategy) for m in models]
        known = factor_cache.found(model.prediction_strategy)
        watched += map(weakref.ref, (known, known.lower, known.root))
        del known, model, models
        gc.collect()
    assert not any(ref() for ref in watched)
