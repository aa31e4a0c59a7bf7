"""Products tile by tile, and what is pulled back through them, against the plain formula in float64."""

import threading

import pytest
import torch
from gpytorch import kernels as gp
from gpytorch.kernels import AdditiveKernel, LinearKernel, MaternKernel, ProductKernel, RBFKernel, RQKernel, ScaleKernel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import tiling
from support.tiling import (
    KERNELS,
    NONE,
    PLANS,
    assert_right,
    distinct,
    each_plan,
    either_side,
    formed,
    prepared,
    product,
    random,
    read,
)

import autokern
from autokern import covariance, kernels
from autokern.core.errors import MemoryBudgetError, SettingsError
from autokern.kernels import matmul, tiles
from autokern.kernels import tree as trees
from autokern.kernels.tiles import Plan
from autokern.runtime import dispatch
from autokern.system import threads
from autokern.system.threads import Member


@pytest.fixture(autouse=True)
def _two(monkeypatch):
    """Two share the work, whatever this machine has."""
    monkeypatch.setattr(threads, "members", lambda device: 2)
    monkeypatch.setattr(tiles, "_WORK", 64)


def arguments(make, n=43, m=37, t=3, same=True, dtype=torch.float64):
    x1 = random(n, 3, dtype=dtype).requires_grad_()
    x2 = x1 if same else random(m, 3, seed=2, dtype=dtype).requires_grad_()
    return prepared(make, dtype=dtype), x1, x2, random(x2.shape[-2], t, seed=3, dtype=dtype).requires_grad_()


LEAVES = [
    RBFKernel,
    lambda: MaternKernel(0.5),
    lambda: MaternKernel(1.5),
    lambda: MaternKernel(2.5),
    RQKernel,
    gp.PeriodicKernel,
    lambda: RBFKernel(active_dims=(1,)),
    lambda: MaternKernel(2.5, ard_num_dims=2, active_dims=(0, 1)),
    gp.ConstantKernel,
]
forms = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        inner.map(lambda one: lambda: ScaleKernel(one())),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: lambda: AdditiveKernel(*(p() for p in parts))),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: lambda: ProductKernel(*(p() for p in parts))),
    ),
    max_leaves=6,
)
MATRIX = None
"""In place of a plan: the matrix is formed."""


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    make=forms.filter(lambda make: trees.leaves(trees.form(make()))),
    plan=st.sampled_from([*PLANS.values(), Plan(32), Plan(1), Plan(48, False), MATRIX]),
    n=st.integers(1, 70),
    m=st.integers(0, 70),
    t=st.integers(1, 20),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 99),
)
def test_any_tree_of_any_size(make, plan, n, m, t, dtype, seed):
    kernel = prepared(lambda batch: make(), dtype=dtype, seed=seed)
    x1 = random(n, 2, seed=seed, dtype=dtype).requires_grad_()
    x2 = random(m, 2, seed=seed + 1, dtype=dtype).requires_grad_() if m else x1
    assert_right(kernel, x1, x2, random(x2.shape[0], t, seed=3, dtype=dtype).requires_grad_(), plan, 5)


def test_every_family_is_in_some_tree_here():
    swept = {name for make in KERNELS.values() for name in trees.leaves(trees.form(make(NONE)))}
    assert swept == {family.name for family in kernels.families(shaped=True)}


BATCHES = [
    ((2,), (2,), (2,), (2,)),
    ((3, 2), (2,), (), ()),
    ((), (), (2,), ()),
    ((), (), (), (2,)),
    ((2, 1), (3,), (1, 3), ()),
    ((), (), (3, 1), (2,)),
    ((1,), (1,), (1,), (1,)),
    *(((0,), (), (), ()), ((), (), (0,), ()), ((), (), (), (0,))),
]


@pytest.mark.thin("batch", "name")
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", ["scaled rbf", "sum of products", "two shapes", "constants first"])
def test_batches_broadcast(batch, name):
    first, second, columns, own = batch
    kernel = prepared(KERNELS[name], torch.Size(own))
    x1, x2 = random(*first, 19, 3).requires_grad_(), random(*second, 18, 3, seed=2).requires_grad_()
    for plan in (Plan(16), MATRIX):
        assert_right(kernel, x1, x2, random(*columns, 18, 2, seed=3).requires_grad_(), plan)
        assert_right(kernel, x1, x1, random(*columns, 19, 2, seed=3).requires_grad_(), plan)


@pytest.mark.parametrize(("n", "m", "t"), [(0, 5, 2), (5, 0, 2), (5, 5, 0), (0, 0, 2), (0, 0, 0)])
@each_plan
def test_what_is_empty_is_what_dense_gives(n, m, t, plan):
    kernel, x1, x2, rhs = arguments(KERNELS["sum of products"], n, m, t, same=False)
    assert_right(kernel, x1, x2, rhs, plan)
    assert formed(*read(kernel, x1, x2)).shape == (n, m)


def test_backward_twice_is_the_same_and_after_a_change_an_error():
    kernel, x1, x2, rhs = arguments(KERNELS["sum of products"], same=False)
    out = product(kernel, x1, x2, rhs, Plan(16))
    leaves = distinct(x1, x2, rhs, *kernel.parameters())
    first, second = (torch.autograd.grad(out.sum(), leaves, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    with torch.no_grad():
        rhs.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@each_plan
@either_side
def test_two_runs_are_equal_to_the_bit(plan, same):
    def run():
        kernel, x1, x2, rhs = arguments(KERNELS["sum of products"], n=150, m=130, same=same, dtype=torch.float32)
        out = product(kernel, x1, x2, rhs, plan)
        return [out, *torch.autograd.grad(out.square().sum(), distinct(x1, x2, rhs, *kernel.parameters()))]

    assert all(map(torch.equal, run(), run()))


@pytest.mark.thin("make", "same")
@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
@either_side
def test_first_and_second_derivatives_by_finite_differences(make, same, monkeypatch):
    monkeypatch.setattr(threads, "members", lambda device: 1)  # thousands of products that last no time
    kernel, x1, x2, rhs = arguments(make, n=18, m=17, t=2, same=same)
    x1, x2 = tiling.in_float64(x1, x2)
    form, tensors = trees.apart(*read(kernel, x1, x2))
    tensors = [t.detach().clone().requires_grad_() for t in (rhs, *tensors)]

    def run(rhs, *rest):
        return matmul.matmul(*form.pair(rest), rhs, Plan(16))

    def matrix(*rest):
        return formed(*form.pair(rest))

    for function, inputs in ((run, tensors), (matrix, tensors[1:])):
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, inputs, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize(
    ("n", "m", "same", "told"),
    [(500, 500, True, 1), (1400, 1400, False, 1), (1500, 1500, False, 2), (1800, 1800, True, 1), (3000, 3000, True, 3),
     (10_000, 10_000, True, 13), (10_000, 10_000, False, 16), (1, 0, False, 1)],
)  # fmt: skip
def test_threads_share_a_product_only_where_each_has_enough_to_do(monkeypatch, n, m, same, told):
    monkeypatch.setattr(tiles, "_WORK", 2**20)
    assert tiles.members(16, n, m, same, 768) == told


@given(
    n=st.integers(1, 400),
    m=st.integers(1, 400),
    same=st.booleans(),
    tile=st.sampled_from([16, 40, 100, 1000]),
    members=st.integers(1, 5),
)
def test_tiles_cover_the_matrix_once_and_members_add_to_different_sums(n, m, same, tile, members):
    m = n if same else m
    covered = torch.zeros(n, m, dtype=torch.int64)
    for turn in tiles.rounds(n, m, same, tile, members):
        writers = torch.full((2, max(n, m)), -1)  # who adds to the sums of a row, and of a column
        for number in range(members):
            for at in tiles.tiles_of([turn], tile, same, Member(number, members, threading.Barrier(1))):
                mirrored = same and at.top != at.left
                covered[at.top : at.bottom, at.left : at.right] += 1
                covered[at.left : at.right, at.top : at.bottom] += int(mirrored)
                for index, (start, stop) in enumerate(((at.top, at.bottom), (at.left, at.right))):
                    before = writers[0 if same else index, start:stop]
                    assert set(before.tolist()) <= {-1, number}
                    before.fill_(number)
    assert torch.equal(covered, torch.ones_like(covered))


@pytest.mark.parametrize("known", [True, False])
def test_sizes_that_do_not_fit_are_refused_in_words(known):
    kernel = RBFKernel() if known else LinearKernel()
    with pytest.raises(SettingsError, match="3 and 2 input dimensions"):
        covariance.matmul(kernel, torch.rand(5, 3), torch.rand(4, 2), torch.rand(4, 1))
    with pytest.raises(SettingsError, match=r"rhs has 5 rows.*4 points"):
        covariance.matmul(kernel, torch.rand(5, 3), torch.rand(4, 3), torch.rand(5, 1))
    with pytest.raises(SettingsError, match="rhs has 5 rows"):
        covariance.matmul(kernel, torch.rand(5, 3), torch.rand(4, 3), torch.rand(5))


def test_no_way_that_fits_is_a_memory_error():
    """KeOps takes the least, but must not be compiled for a single call where it cannot be."""
    excluded = autokern.using(memory="1MiB", exclude=["keops"])
    told = r"kernel_matmul.*1 MiB may be taken \(AUTOKERN_MEMORY.*What would work: inducing"  # tiles did not fit
    with excluded, pytest.raises(MemoryBudgetError, match=told):
        covariance.matmul(RBFKernel(), torch.rand(5000, 2), None, torch.rand(5000, 1))


def test_without_room_for_the_matrix_tiles_multiply():
    x, rhs = torch.rand(6000, 2), torch.rand(6000, 1)
    with autokern.using(memory="64MiB"):
        covariance.matmul(RBFKernel(), x, None, rhs).sum().backward()
    assert all(name.startswith("tiled") for name in dispatch.stats()["kernel_matmul"])
