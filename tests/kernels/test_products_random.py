"""Products of random trees tile by tile against the plain formula in float64, and how they are cut."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiling import KERNELS, NONE, PLANS, assert_right, prepared, random

from autokern import kernels
from autokern.kernels import tiles
from autokern.kernels import tree as trees
from autokern.kernels.tiles import Plan
from autokern.system import threads


@pytest.fixture(autouse=True)
def _two(monkeypatch):
    """Two share the work, whatever this machine has."""
    monkeypatch.setattr(threads, "members", lambda device: 2)


# --- any tree, any shape ----------------------------------------------------------------------------------------------

LEAVES = [
    RBFKernel,
    lambda: MaternKernel(0.5),
    lambda: MaternKernel(1.5),
    lambda: MaternKernel(2.5),
    RQKernel,
    PeriodicKernel,
    lambda: RBFKernel(active_dims=(1,)),
    lambda: MaternKernel(2.5, ard_num_dims=2, active_dims=(0, 1)),
    ConstantKernel,
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


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    make=forms.filter(lambda make: trees.leaves(trees.form(make()))),
    plan=st.sampled_from([*PLANS.values(), Plan(32), Plan(1), Plan(48, False)]),
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


# --- how it is cut ----------------------------------------------------------------------------------------------------


class Alone:
    """A member who waits for nobody."""

    def __init__(self, number, count):
        self.number, self.count = number, count

    def check(self):
        pass

    wait = check


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
            for at in tiles.tiles_of([turn], tile, same, Alone(number, members)):
                mirrored = same and at.top != at.left
                covered[at.top : at.bottom, at.left : at.right] += 1
                covered[at.left : at.right, at.top : at.bottom] += int(mirrored)
                for index, (start, stop) in enumerate(((at.top, at.bottom), (at.left, at.right))):
                    before = writers[0 if same else index, start:stop]
                    assert set(before.tolist()) <= {-1, number}
                    before.fill_(number)
    assert torch.equal(covered, torch.ones_like(covered))
