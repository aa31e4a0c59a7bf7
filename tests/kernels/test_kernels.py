"""kernels/: every family, layout and derivative against the plain formula, finite differences and gpytorch."""

import copy
import itertools
import math
import pickle
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autokern import kernels
from autokern.kernels import embedded, families, stationary
from autokern.kernels import matrix as matrices
from autokern.kernels.family import Family
from autokern.kernels.tree import Node, Tree

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = families()
EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
each_way = pytest.mark.parametrize("slow", [True, False], ids=["slow roots", "fast roots"])  # as a CPU may prefer
LAYOUTS = ("whole", "tiled")
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
SMOOTH = [f for f in FAMILIES if f.name in ("rbf", "matern52")]
"""Families that are twice differentiable where points coincide."""


class Covariance(NamedTuple):
    """A family, its lengthscale ``(..., 1, d or 1)``, and its outputscale ``(...)`` or None."""

    family: Family
    lengthscale: torch.Tensor
    outputscale: torch.Tensor | None


def matrix(covariance, x1, x2, layout):
    """The matrix of a leaf and its scale, which are read as `kernels.embedded` reads kernels."""
    of, lengthscale, scale = covariance
    same = matrices.same_points(x1, x2)
    one = x1 is x2 or (same and not (x1.requires_grad or x2.requires_grad))
    centre = embedded._common(x1, None if one else x2)
    leaf = Node("leaf", of.name)
    node, weights = (leaf, []) if scale is None else (Node("scale", "", (leaf,)), [scale])
    tree = Tree(node, [(x1 - centre) / lengthscale], [], weights)
    return matrices.matrix(tree, None if one else [(x2 - centre) / lengthscale], same, layout)


def reference(covariance, x1, x2):
    """The truth in float64, by explicit differences."""
    difference = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    scaled = difference / covariance.lengthscale.unsqueeze(-2)
    k = covariance.family(scaled.square().sum(-1) * covariance.family.gamma)
    return k if covariance.outputscale is None else k * covariance.outputscale[..., None, None]


@pytest.fixture(autouse=True)
def _narrow_strips(monkeypatch):
    monkeypatch.setattr(matrices, "CACHED", 2**12)


def tensors(family, n, m, d, *, batch=(), ard=True, scaled=True, dtype=torch.float64, seed=0, grad=False):
    """A covariance and two sets of points, batches by position: x1, x2, hyperparameters."""
    generator = torch.Generator().manual_seed(seed)
    first, second, hyper = batch or ((), (), ())
    x1 = torch.randn(*first, n, d, generator=generator, dtype=torch.float64)
    x2 = torch.randn(*second, m, d, generator=generator, dtype=torch.float64)
    lengthscale = 0.5 + torch.rand(*hyper, 1, d if ard else 1, generator=generator, dtype=torch.float64)
    outputscale = 0.5 + torch.rand(hyper, generator=generator, dtype=torch.float64) if scaled else None
    made = [t if t is None else t.to(dtype).requires_grad_(grad) for t in (x1, x2, lengthscale, outputscale)]
    return Covariance(family, made[2], made[3]), made[0], made[1]


def bound(cov: Covariance, x1: torch.Tensor, x2: torch.Tensor) -> float:
    """The contract of the op `kernel_matrix`: what 50 eps of the scaled squared norms change, and 20 eps."""
    a, b, scale = x1.detach().double(), x2.detach().double(), cov.lengthscale.detach().double()
    eps = EPS[x1.dtype]
    centre = a.mean(-2, keepdim=True)
    largest = max(((t - centre) / scale).square().sum(-1).max().item() for t in (a, b))
    change = torch.tensor(50 * eps * largest * cov.family.gamma, dtype=torch.float64)
    drop = (cov.family.derivatives[0](change * 0) - cov.family.derivatives[0](change)).abs().item()
    height = 1.0 if cov.outputscale is None else cov.outputscale.max().item()
    return height * (drop + 20 * eps)


BATCHES = [
    ((), (), ()),
    ((3,), (3,), (3,)),
    ((3,), (3,), ()),
    ((), (), (3,)),
    ((3,), (), ()),
    ((), (3,), ()),
    ((2, 1), (3,), ()),
    ((2, 1), (1, 3), (2, 3)),
    ((1,), (1,), (1,)),
    ((3, 1), (3, 1), (2,)),
]


@settings(max_examples=200, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    layout=st.sampled_from(LAYOUTS),
    n=st.integers(1, 80),
    m=st.integers(1, 70),
    d=st.integers(1, 6),
    batch=st.sampled_from(BATCHES),
    ard=st.booleans(),
    scaled=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    grad=st.booleans(),
    seed=st.integers(0, 99),
    offset=st.sampled_from([0.0, 10.0, -1000.0]),
    how=st.sampled_from(["same", "equal", "view", "other", "other"]),
    duplicates=st.booleans(),
)
def test_values_of_any_shape(family, layout, n, m, d, batch, ard, scaled, dtype, grad, seed, offset, how, duplicates):
    cov, x1, x2 = tensors(family, n, m, d, batch=batch, ard=ard, scaled=scaled, dtype=dtype, seed=seed)
    x1, x2 = x1 + offset, x2 + offset
    if duplicates:
        x1[..., n - n // 2 :, :] = x1[..., : n // 2, :].clone()
    x1.requires_grad_(grad)
    x2 = {"same": x1, "equal": x1.detach().clone(), "view": x1[..., :], "other": x2.requires_grad_(grad)}[how]
    found = matrix(cov, x1, x2, layout)
    exact = Covariance(family, *(t if t is None else t.detach().double() for t in cov[1:]))
    truth = reference(exact, x1.detach().double(), x2.detach().double())
    assert found.shape == truth.shape
    assert found.dtype == x1.dtype
    k = found.detach()
    assert (k.double() - truth).abs().max().item() <= bound(cov, x1, x2)
    if how != "other":
        height = torch.ones(()) if cov.outputscale is None else cov.outputscale.unsqueeze(-1)
        off = k.diagonal(dim1=-2, dim2=-1) - height
        assert off.abs().max() <= (1e-14 if family.name == "matern12" else 0), "the diagonal is exact"
        assert (k - k.mT).abs().max() <= bound(cov, x1, x1)


def as_function(cov, layout):
    def function(x1, x2, lengthscale, outputscale=None):
        return matrix(Covariance(cov.family, lengthscale, outputscale), x1, x2, layout)

    return function


@pytest.mark.thin("family layout", "batch layout")
@each_family
@each_layout
@pytest.mark.parametrize("batch", [((), (), ()), ((2,), (2,), (2,)), ((2,), (), ()), ((), (2,), ()), ((), (), (2,))])
def test_gradcheck_and_gradgradcheck(family, layout, batch):
    cov, *points = tensors(family, 4, 3, 2, batch=batch, grad=True)
    function, inputs = as_function(cov, layout), (*points, cov.lengthscale, cov.outputscale)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@each_layout
@pytest.mark.parametrize("family", SMOOTH, ids=lambda f: f.name)
def test_gradcheck_and_gradgradcheck_at_equal_points(family, layout):
    cov, x, _ = tensors(family, 4, 1, 2, grad=True)
    function, inputs = as_function(cov, layout), (x, cov.lengthscale, cov.outputscale)
    assert torch.autograd.gradcheck(lambda x, *rest: function(x, x, *rest), inputs)
    assert torch.autograd.gradgradcheck(lambda x, *rest: function(x, x, *rest), inputs)


@each_way
@each_family
def test_slopes_are_derivatives_of_the_formula(family, slow, monkeypatch):
    monkeypatch.setattr(stationary, "_is_slow", lambda: slow)
    u = torch.linspace(0.05, 4, 25, dtype=torch.float64) * math.copysign(1, family.gamma)
    for value, slope in itertools.pairwise(family.derivatives):
        there = u.clone().requires_grad_()
        (exact,) = torch.autograd.grad(value(there).sum(), there)
        torch.testing.assert_close(slope(u), exact, rtol=1e-10, atol=1e-12)
    k, dk = u.clone(), torch.empty_like(u)
    k = family.epilogue(k, dk)
    torch.testing.assert_close(k, family.derivatives[0](u), rtol=1e-12, atol=0)
    torch.testing.assert_close(dk, family.derivatives[1](u), rtol=1e-10, atol=0)
    torch.testing.assert_close(family.epilogue(u.clone(), None), k, rtol=1e-14, atol=0)


@each_way
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_roots_and_exponentials_are_right_to_rounding_in_either_way(slow, dtype, monkeypatch):
    monkeypatch.setattr(stationary, "_is_slow", lambda: slow)
    eps = torch.finfo(dtype).eps
    u = torch.cat((torch.zeros(3, dtype=dtype), torch.logspace(-30, 4, 5000, dtype=dtype)))
    truth = u.double()
    root = stationary.root_(u.clone(), torch.empty_like(u)).double()
    torch.testing.assert_close(root, truth.sqrt(), rtol=2 * eps, atol=1e-15)
    torch.testing.assert_close(stationary.exp_(-u).double(), (-truth).exp(), rtol=0, atol=eps)
    out = torch.empty_like(u)
    assert stationary.decay(u, out) is out
    torch.testing.assert_close(out.double(), (-truth).exp(), rtol=0, atol=eps)
    torch.testing.assert_close(stationary.decay(u.clone(), u), out, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rational_quadratic_keeps_its_digits_at_small_distances(dtype):
    rq, alpha = kernels.family("rq"), torch.tensor(1e4, dtype=dtype)
    u = torch.logspace(-12, 0, 60, dtype=dtype)
    truth = torch.exp(-alpha.double() * torch.log1p(u.double()))
    torch.testing.assert_close(rq.formula(u, alpha).double(), truth, rtol=3 * EPS[dtype] * 1e4, atol=1e-30)
    small = u < 1e-3
    error = (rq.formula(u, alpha).double() - truth).abs()[small].max().item()
    assert error < 20 * EPS[dtype]


@each_family
def test_families_travel(family):
    assert pickle.loads(pickle.dumps(family)) is family
    assert copy.deepcopy(family) is family
    assert kernels.family(family.name) is family
