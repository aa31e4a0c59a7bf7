"""Strips, inverse factors and what they solve, their growth by new data, and how strategies keep them."""

from __future__ import annotations

import functools
import gc
import pickle
import sys
import threading
import weakref

import gpytorch
import psutil
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import LinearKernel, MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from linear_operator.operators import DenseLinearOperator
from linear_operator.utils.errors import NotPSDError

import autokern
from autokern import conditioning
from autokern.conditioning import Conditioned
from autokern.factors import solved
from autokern.strips import Strips

pytestmark = pytest.mark.usefixtures("one_thread")
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
often = hypothesis_settings(max_examples=40, deadline=None)
BATCHES = [(), (2,), (3, 2)]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lower(n, batch=(), seed=0):
    return (drawn(*batch, n, n, seed=seed) / n**0.5).tril(-1) + 2 * torch.eye(n, dtype=torch.float64)


def new_rows(n, q, batch=(), seed=0):
    return drawn(*batch, q, n + q, seed=seed).tril(n)


def grown(matrix, rows):
    """The dense matrix with rows appended."""
    return torch.cat((torch.nn.functional.pad(matrix, (0, rows.shape[-2])), rows), dim=-2)


@pytest.fixture
def narrow(monkeypatch):
    """Strips of a few rows, so that small matrices have several."""
    module = sys.modules["autokern.strips"]
    monkeypatch.setattr(module, "_ROWS", 4)
    monkeypatch.setattr(module, "_SPARE", 3)


# --- strips -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("n", [1, 255, 256, 257, 600])
def test_products_are_those_of_the_dense_matrix(n, batch):
    matrix = lower(n, batch)
    strips = Strips(matrix)
    assert torch.equal(strips.dense(), matrix)
    assert (strips.n, strips.batch) == (n, batch)
    for lead in {(), batch, (5, *[1] * len(batch)), (5, *batch)}:
        b = drawn(*lead, 4, n, seed=1)
        close(strips.right_transposed(b), b @ matrix.mT)
        close(strips.right(b), b @ matrix)


@often
@given(
    start=st.sampled_from([1, 2, 255, 256, 257, 300]),
    steps=st.lists(st.integers(1, 40), max_size=8),
    batch=st.sampled_from(BATCHES[:2]),
)
def test_rows_appended_many_times_make_the_dense_matrix(start, steps, batch):
    matrix = lower(start, batch)
    strips = Strips(matrix)
    for seed, q in enumerate(steps):
        rows = new_rows(strips.n, q, batch, seed)
        matrix, strips = grown(matrix, rows), strips.appended(rows)
    assert torch.equal(strips.dense(), matrix)
    b = drawn(3, strips.n)
    close(strips.right_transposed(b), b @ matrix.mT)
    close(strips.right(b), b @ matrix)


@often
@given(births=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 30)), max_size=12))
def test_no_child_writes_into_another_of_the_family(births):
    """Whatever the family tree, all members keep their values bit for bit."""
    family = [(Strips(lower(20)), lower(20))]
    for seed, (parent, q) in enumerate(births):
        strips, matrix = family[parent % len(family)]
        rows = new_rows(strips.n, q, seed=seed)
        family.append((strips.appended(rows), grown(matrix, rows)))
    for strips, matrix in family:
        assert torch.equal(strips.dense(), matrix)


def memories(strips):
    return [piece.untyped_storage().data_ptr() for _, _, piece in strips._pieces()]


def test_what_is_there_is_shared_and_the_second_child_has_rows_of_its_own():
    parent = Strips(lower(300))
    first, second = parent.appended(new_rows(300, 2)), parent.appended(new_rows(300, 2, seed=1))
    grandchild = first.appended(new_rows(302, 3))
    assert memories(parent)[0] == memories(first)[0] == memories(second)[0] == memories(grandchild)[0]
    assert memories(first)[-1] == memories(grandchild)[-1]
    assert memories(first)[-1] != memories(second)[-1]


def test_a_long_chain_takes_the_memory_of_one_matrix():
    strips = Strips(lower(256))
    for seed in range(200):
        strips = strips.appended(new_rows(strips.n, 1, seed=seed))
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for _, _, p in strips._pieces()}
    assert sum(storages.values()) < 1.5 * strips.n**2 * 8


def test_threads_that_append_to_one_parent_do_not_share_rows():
    parent = Strips(lower(20)).appended(new_rows(20, 1))
    children, rows = {}, [new_rows(21, 1, seed=k) for k in range(16)]
    barrier = threading.Barrier(16)

    def append(k):
        barrier.wait()
        children[k] = parent.appended(rows[k])

    threads = [threading.Thread(target=append, args=(k,)) for k in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, child in children.items():
        assert torch.equal(child.dense()[20:], grown(parent.dense(), rows[k])[20:])


@pytest.mark.parametrize("batch", BATCHES[:2], ids=str)
@pytest.mark.parametrize("lead", [(), (2,), (3, 1)], ids=str)
def test_derivatives_of_products_with_several_strips(batch, lead, narrow):
    strips = Strips(lower(6, batch))
    for q in (1, 2, 3):
        strips = strips.appended(new_rows(strips.n, q, batch))
    assert len(strips._pieces()) > 2
    b = drawn(*lead, 2, strips.n).requires_grad_()
    for product in (strips.right_transposed, strips.right):
        assert torch.autograd.gradcheck(product, b)
        assert torch.autograd.gradgradcheck(product, b)


def test_a_matrix_that_wants_gradients_stays_in_one_piece(narrow):
    matrix, b = lower(11).requires_grad_(), drawn(2, 11).requires_grad_()
    for name in ("right_transposed", "right"):
        assert torch.autograd.gradcheck(lambda m, b: getattr(Strips(m), name)(b), (matrix, b))  # noqa: B023


@pytest.mark.parametrize("product", ["right_transposed", "right"])
def test_a_graph_of_the_parent_survives_rows_of_children(product, narrow):
    for parent in (Strips(lower(3)), Strips(lower(9)), Strips(lower(9)).appended(new_rows(9, 1))):
        dense, b = parent.dense().clone(), drawn(2, parent.n).requires_grad_()
        out = getattr(parent, product)(b)
        for child in (parent.appended(new_rows(parent.n, 1)), parent.appended(new_rows(parent.n, 2))):
            child.appended(new_rows(child.n, 1))
        (found,) = torch.autograd.grad(out.square().sum(), b)
        truth = b @ (dense.mT if product == "right_transposed" else dense)
        close(found, 2 * truth @ (dense if product == "right_transposed" else dense.mT))


# --- solutions with a factor ------------------------------------------------------------------------------------------


def spd(n, batch=(), seed=0):
    root = drawn(*batch, n, n, seed=seed)
    return root @ root.mT / n + torch.eye(n, dtype=torch.float64)


@pytest.mark.parametrize(("batch", "lead"), [((), ()), ((2,), (2,)), ((), (3,)), ((2,), ()), ((2,), (3, 1))], ids=str)
def test_solved_and_its_derivatives(batch, lead):
    root, rhs = drawn(*batch, 4, 4).requires_grad_(), drawn(*lead, 4, 2, seed=1).requires_grad_()

    def of(root, rhs):
        matrix = root @ root.mT + torch.eye(4, dtype=torch.float64)
        return solved(matrix, torch.linalg.cholesky(matrix), rhs)

    close(of(root, rhs), torch.linalg.solve(root @ root.mT + torch.eye(4).double(), rhs))
    assert torch.autograd.gradcheck(of, (root, rhs))
    assert torch.autograd.gradgradcheck(of, (root, rhs))
    of(root.detach(), rhs).sum().backward()
    of(root, rhs.detach()).sum().backward()


def test_solved_passes_nothing_through_the_factor():
    matrix = spd(5)
    factor = torch.linalg.cholesky(matrix).requires_grad_()
    assert not solved(matrix, factor, drawn(5, 1)).requires_grad


# --- conditioned ------------------------------------------------------------------------------------------------------


def covariance(x, z=None, scale=1.0):
    z = x if z is None else z
    return scale * (-(x.unsqueeze(-2) - z.unsqueeze(-3)).square().sum(-1)).exp()


def noisy(x, noise=0.05, scale=1.0):
    return covariance(x, scale=scale) + noise * torch.eye(x.shape[-2], dtype=x.dtype)


def points(*shape, seed=0, dtype=torch.float64):
    return (2 * torch.rand(*shape, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def conditioned(x, noise=0.05, scale=1.0):
    return Conditioned(torch.linalg.cholesky(noisy(x, noise, scale)), residual=x.sum(-1).sin())


def assert_knows(known, k, residual, seed=7, near=close):
    """All answers are those of the dense noisy covariance `k`."""
    n = k.shape[-1]
    rows = covariance(points(6, seed=seed), points(n, seed=seed + 1)).to(k)
    inverse = torch.linalg.inv(k)
    truth = rows @ inverse @ rows.mT
    assert known.n == n
    near(known.alpha, (inverse @ residual.unsqueeze(-1)).squeeze(-1).expand_as(known.alpha))
    white = known.whitened(rows)
    near(white @ white.mT, truth)
    for multiply in (False, True):
        near(known.explained(rows, multiply), truth.diagonal(dim1=-2, dim2=-1))
        near(known.explained_covariance(rows, multiply), truth)
    near(known.root @ known.root.mT, inverse)


def extended(known, x, new, noise=0.05, scale=1.0):
    cross = covariance(new, x, scale)
    return known.extended(cross, noisy(new, noise, scale), new.sum(-1).sin())


def joined(x, new):
    lead = torch.broadcast_shapes(x.shape[:-2], new.shape[:-2])
    return torch.cat((x.expand(*lead, -1, -1), new.expand(*lead, -1, -1)), dim=-2)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("n", [1, 20, 300])
def test_what_is_known_of_training_data(n, batch):
    x = points(*batch, n)
    assert_knows(conditioned(x), noisy(x), x.sum(-1).sin())


@pytest.mark.parametrize("batch", BATCHES[:2], ids=str)
@pytest.mark.parametrize("q", [1, 2, 5])
def test_new_points_become_rows_of_the_strips(q, batch):
    x, new = points(*batch, 30), points(*batch, q, seed=1)
    parent = conditioned(x)
    child = extended(parent, x, new)
    assert child.border is None
    assert child.grown
    assert not child.requires_grad
    assert memories(child.inverse)[0] == memories(parent.inverse)[0]
    everything = joined(x, new)
    assert_knows(child, noisy(everything), everything.sum(-1).sin())
    assert_knows(parent, noisy(x), x.sum(-1).sin())


def test_thirty_times_as_accurate_as_once():
    x = points(20)
    known = conditioned(x)
    for seed in range(30):
        new = points(1 + seed % 3, seed=100 + seed)
        known, x = extended(known, x, new), joined(x, new)
    assert_knows(known, noisy(x), x.sum(-1).sin())


@pytest.mark.parametrize(
    ("old", "new", "targets"),
    [
        ((), (4,), (4,)),  # a batch of new points
        ((), (3, 4), (3, 4)),
        ((2,), (4, 2), (4, 2)),
        ((), (), (5,)),  # several observations of the same points
        ((2,), (2,), (5, 2)),
        ((), (4,), (5, 4)),
        ((2,), (4, 2), (5, 4, 2)),
    ],
)
@pytest.mark.parametrize("times", [1, 3])
def test_batches_of_new_points_and_of_targets(old, new, targets, times):
    x = points(*old, 25)
    known, residual = conditioned(x), x.sum(-1).sin().expand(*targets, -1) if len(targets) > len(old) else x.sum(-1).sin()
    residual = residual.expand(*torch.broadcast_shapes(targets, old), -1)
    for seed in range(times):
        at, values = points(*new, 2, seed=seed + 1), drawn(*targets, 2, seed=seed)
        known, x = known.extended(covariance(at, x), noisy(at), values), joined(x, at)
        residual = torch.cat((residual, values.expand(*residual.shape[:-1], 2)), dim=-1)
    assert_knows(known, noisy(x), residual)
    assert (known.border is None) == (old == new)


@pytest.mark.parametrize("times", [1, 2])
def test_gradients_by_new_points_and_targets(times):
    x = points(12)

    def answers(known, k, y):
        rows = covariance(points(4, seed=8), points(k.shape[-1], seed=9))
        if known is None:
            inverse = torch.linalg.inv(k)
            return inverse @ y, (rows @ inverse * rows).sum(-1), rows @ inverse @ rows.mT
        return known.alpha, known.explained(rows), known.explained_covariance(rows)

    def of(direct, *pairs):
        known, everything, y = conditioned(x), x, x.sum(-1).sin()
        for at, values in zip(pairs[::2], pairs[1::2], strict=True):
            known = known.extended(covariance(at, everything), noisy(at), values)
            everything, y = joined(everything, at), torch.cat((y, values))
            assert known.border is not None
        return answers(None if direct else known, noisy(everything), y)

    pairs = [t.requires_grad_() for k in range(times) for t in (points(2, seed=k + 1), drawn(2, seed=k))]
    for found, truth in zip(of(False, *pairs), of(True, *pairs), strict=True):
        close(found, truth)
        cotangent = drawn(*found.shape, seed=4)
        close(*(torch.autograd.grad(v, pairs, cotangent, retain_graph=True, materialize_grads=True) for v in (found, truth)))
    assert torch.autograd.gradgradcheck(functools.partial(of, False), pairs, atol=1e-4)


def test_detached_is_the_same_without_gradients():
    x, new = points(12), points(2, seed=1).requires_grad_()
    plain = conditioned(x)
    assert plain.detached() is plain
    child = extended(plain, x, new)
    assert child.requires_grad
    cut = child.detached()
    assert not cut.requires_grad
    assert cut.inverse is child.inverse
    assert child.detached() is cut
    k = noisy(x.clone().requires_grad_())
    whole = Conditioned(torch.linalg.cholesky(k), matrix=k, residual=x.sum(-1).sin())
    whole.inverse
    for known in (cut, whole.detached()):
        everything = joined(x, new.detach()) if known is cut else x
        assert_knows(known, noisy(everything), everything.sum(-1).sin())
        assert not known.inverse.requires_grad
        grandchild = extended(known, everything, points(1, seed=5))
        assert not grandchild.requires_grad


@pytest.mark.parametrize("first", ["inverse", "root", "whitened", "extended", "detached"])
def test_what_is_formed_without_gradients_first_does_not_cut_them_off(first):
    """A reading under `no_grad` must leave an attached factor as it is."""
    at, rows = points(12).requires_grad_(), covariance(points(4, seed=1), points(12, seed=2))

    def slope(before):
        k = noisy(at)
        known = Conditioned(torch.linalg.cholesky(k), matrix=k, residual=at.sum(-1).sin())
        known.alpha
        with torch.no_grad():
            before(known)
        return torch.autograd.grad(known.explained(rows, multiply=True).sum(), at)[0]

    reading = {
        "inverse": lambda known: known.inverse,
        "root": lambda known: known.root,
        "whitened": lambda known: known.whitened(rows),
        "extended": lambda known: extended(known, at.detach(), points(1, seed=3)),
        "detached": lambda known: known.detached().root,
    }
    close(slope(reading[first]), slope(lambda known: None))


# --- the guard --------------------------------------------------------------------------------------------------------

TINY = [(torch.float64, 1e-10), (torch.float64, 3e-10), (torch.float32, 1e-5), (torch.float32, 1e-6)]


@pytest.mark.parametrize(("dtype", "noise"), TINY, ids=str)
def test_duplicates_under_tiny_noise_are_not_appended(dtype, noise):
    x = points(10, dtype=dtype)
    known = conditioned(x, noise)
    assert extended(known, x, x[:1], noise) is None
    assert extended(known, x, torch.cat((points(1, seed=4, dtype=dtype), x[:1])), noise) is None
    assert extended(known, x, points(1, seed=4, dtype=dtype), 0.1) is not None
    assert extended(known, x, points(1, seed=4, dtype=dtype).expand(2, 3), noise) is None


class Regression(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel=None, noise=0.05, likelihood=None):
        super().__init__(x, y, likelihood or GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-20)))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel or ScaleKernel(RBFKernel())
        if likelihood is None:
            self.likelihood.noise_covar.noise = noise
        self.to(x).eval()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def regression(n=30, dtype=torch.float64, **options):
    x = points(n, dtype=dtype)
    return Regression(x, x.sum(-1).sin(), **options)


@pytest.mark.parametrize("scale", [0.1, 1.0, 1e4])
@pytest.mark.parametrize(("dtype", "noise"), TINY, ids=str)
def test_a_model_with_duplicates_is_as_accurate_as_a_refit(dtype, noise, scale):
    at = points(7, seed=9, dtype=dtype)

    def of(dtype, refit):
        x = points(10).to(dtype)
        model = Regression(x, x.sum(-1).sin(), noise=noise * scale)
        model.covar_module.outputscale = scale
        new, values = x[:2], x[:2].sum(-1).sin()
        if refit:
            model = model.get_fantasy_model(new, values) if model(at.to(dtype)) is None else model
            model.set_train_data(torch.cat((x, new)), torch.cat((model.train_targets, values)), strict=False)
        else:
            model(at.to(dtype))
            model = model.get_fantasy_model(new, values)
        posterior = model(at.to(dtype))
        return posterior.mean.double(), posterior.covariance_matrix.double()

    with torch.no_grad(), gpytorch.settings.min_variance(float_value=1e-30, double_value=1e-30):
        truth = of(torch.float64, True)
        refit = of(dtype, True)
        with autokern.enabled():
            found = of(dtype, False)
    for ours, theirs, true in zip(found, refit, truth, strict=True):
        unit = true.abs().max() * (1e-9 if dtype == torch.float64 else 1e-5)
        assert (ours - true).abs().max() <= 3 * (theirs - true).abs().max() + unit


# --- kept beside strategies -------------------------------------------------------------------------------------------


def strategy(model):
    model(points(3, seed=5))
    return model.prediction_strategy


def test_one_factor_is_found_again():
    with autokern.enabled():
        kept = strategy(regression())
        known = conditioning.of(kept)
        assert conditioning.of(kept) is conditioning.found(kept) is known
        assert_knows(known, noisy_of(kept), kept.train_labels - kept.train_prior_dist.loc)
    conditioning.forget(kept)
    assert conditioning.found(kept) is None


def noisy_of(kept):
    return kept.lik_train_train_covar.to_dense().detach()


def test_gradients_are_kept_apart_and_dropped_after_a_backward_pass():
    with autokern.enabled():
        kept = strategy(regression())
        cut = conditioning.of(kept)
        with gpytorch.settings.detach_test_caches(False):
            assert conditioning.found(kept) is None
            whole = conditioning.of(kept)
            assert whole is not cut
            assert whole.requires_grad
            assert conditioning.of(kept) is whole
            with torch.no_grad():
                assert conditioning.of(kept) is not None
        assert conditioning.of(kept) is cut
        whole.alpha.sum().backward()
        with gpytorch.settings.detach_test_caches(False):
            assert conditioning.found(kept) is None
        assert conditioning.of(kept) is cut


def dense_kernel(kind):
    class Mine(gpytorch.kernels.Kernel):
        has_lengthscale = True

        def forward(self, x1, x2, diag=False, **params):
            k = covariance(x1 / self.lengthscale, x2 / self.lengthscale)
            return DenseLinearOperator(k) if kind == "operator" else k

    return Mine()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (regression, True),
        (lambda: regression(kernel=dense_kernel("tensor")), True),
        (lambda: regression(kernel=dense_kernel("operator")), True),
        (lambda: regression(likelihood=FixedNoiseGaussianLikelihood(torch.full((30,), 0.1).double())), True),
        (lambda: regression(kernel=LinearKernel()), False),
        (lambda: regression(kernel=ScaleKernel(LinearKernel()) + RBFKernel()), False),
    ],
    ids=["rbf", "mine", "mine as operator", "fixed noise", "linear", "linear and rbf"],
)
def test_plain_is_one_dense_matrix_and_a_diagonal(make, expected):
    kept = strategy(make())
    assert conditioning.plain(kept) is expected
    assert (conditioning.of(kept) is not None) is expected


def test_multitask_is_not_plain():
    x = points(8)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2).double()

    class Multitask(Regression):
        def forward(self, x):
            mean = self.mean_module(x).unsqueeze(-1).expand(-1, 2)
            return gpytorch.distributions.MultitaskMultivariateNormal(mean, self.covar_module(x))

    y = torch.stack((x.sum(-1), -x.sum(-1)), dim=-1)
    kept = strategy(Multitask(x, y, MultitaskKernel(RBFKernel(), num_tasks=2), likelihood=likelihood))
    assert not conditioning.plain(kept)
    assert conditioning.of(kept) is None


def test_a_covariance_that_is_not_positive_definite_raises():
    model = regression()
    kept = strategy(model)
    kept.lik_train_train_covar._diag_tensor.diag_values.data.fill_(-2.0)
    with pytest.raises(NotPSDError), pytest.warns(gpytorch.utils.warnings.NumericalWarning):
        conditioning.of(kept)
    assert conditioning.found(kept) is None


def test_attached_nothing_means_to_factorise_when_needed():
    kept = strategy(regression())
    conditioning.attach(kept, None, attached=False)
    assert conditioning.is_exact(kept)
    assert conditioning.found(kept) is None
    assert not conditioning.of(kept).grown


@pytest.mark.parametrize("detached", [True, False])
def test_nothing_is_kept_of_a_strategy_that_is_dropped(detached):
    gc.collect()
    before = len(conditioning._kept)
    with autokern.enabled(), gpytorch.settings.detach_test_caches(detached):
        model = regression()
        imagined = [model.get_fantasy_model(points(2, seed=3), drawn(2)) for _ in range(3) if model(points(3)) is not None]
        imagined[0](points(3)).variance
        watched = [weakref.ref(m.prediction_strategy) for m in (model, *imagined)]
        factor = weakref.ref(conditioning.found(model.prediction_strategy).lower)
        assert len(conditioning._kept) == before + 4
        del model, imagined
        gc.collect()
    assert not any(ref() for ref in watched)
    assert factor() is None
    assert len(conditioning._kept) == before


def test_memory_is_flat_over_fifty_dropped_models():
    process, resident = psutil.Process(), []
    with autokern.enabled():
        for seed in range(50):
            model = regression(400)
            with gpytorch.settings.detach_test_caches(seed % 2 == 0):
                model(points(50, seed=seed)).variance
                model.get_fantasy_model(points(1, seed=seed), drawn(1))(points(50)).variance.sum().backward()
            if seed % 10 == 9:
                del model
                gc.collect()
                resident.append(process.memory_info().rss)
    assert resident[-1] - resident[1] < 12 * 2**20


@pytest.mark.parametrize("detached", [True, False])
def test_pickled_models_know_nothing_of_autokern(detached):
    with autokern.enabled(), gpytorch.settings.detach_test_caches(detached):
        model = regression()
        expected = model(points(4, seed=2)).variance
        imagined = model.get_fantasy_model(points(2, seed=3), drawn(2))
        packed = [pickle.dumps(m) for m in (model, imagined)]
        assert not any(b"autokern" in p for p in packed)
        torch.testing.assert_close(pickle.loads(packed[0])(points(4, seed=2)).variance, expected)
    torch.testing.assert_close(pickle.loads(packed[0])(points(4, seed=2)).variance, expected)
    after = imagined(points(4, seed=2))
    torch.testing.assert_close(pickle.loads(packed[1])(points(4, seed=2)).variance, after.variance)
