"""The op `solve`: large systems solved exactly or to a stated residual, in direct calls and predictions."""

import contextlib
import copy
import gc
import warnings
from unittest import mock

import linear_operator
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from linear_operator import settings as library
from linear_operator.operators import (
    AddedDiagLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    KroneckerProductLinearOperator,
)
from linear_operator.utils.warnings import NumericalWarning
from support.models import points

import autokern
from autokern.core.decision import collecting
from autokern.density import systems
from autokern.hooks.kernel_operator import matrix_free
from autokern.model.libraries import TOLERANCE
from autokern.ops import solve

pytestmark = pytest.mark.usefixtures("fresh")
N = 1100


def far(found, truth):
    return float((found.detach().double() - truth.detach()).norm() / truth.detach().norm())


class System:
    """A covariance with noise whose leaves want gradients, a right-hand side, and how the covariance is made."""

    def __init__(self, kernel=MaternKernel, dtype=torch.float64, each=False, shape=(N, 3), wanted=True):
        self.x = points(N, dtype=dtype)
        self.kernel = ScaleKernel(kernel()).to(dtype).requires_grad_(wanted)
        self.kernel.base_kernel.lengthscale = 0.4
        noise = 0.02 + 0.03 * points(N, d=1, dtype=dtype)[:, 0] if each else self.x.new_full((1,), 0.03)
        self.noise = noise.requires_grad_(wanted)
        self.rhs = (
            (points(shape[-2], d=1, dtype=dtype, seed=1) + torch.arange(shape[-1]).to(dtype))
            .sin()
            .expand(shape)
            .clone()
        )
        self.rhs.requires_grad_(wanted)
        self.leaves = [*self.kernel.parameters(), self.noise, self.rhs]

    def matrix(self, formed):
        covariance = DenseLinearOperator(self.kernel(self.x).to_dense())
        if not formed:
            covariance = matrix_free(self.kernel, self.x, self.x)
        return AddedDiagLinearOperator(covariance, DiagLinearOperator(self.noise.expand(N)))

    def truth(self, quad=False):
        own = copy.deepcopy(self.kernel).double()
        leaves = [*own.parameters(), *(t.detach().double().requires_grad_(t.requires_grad) for t in self.leaves[-2:])]
        k = own(self.x.double()).to_dense() + torch.diag(leaves[-2].expand(N))
        found = torch.linalg.solve(k, leaves[-1])
        found = (found * leaves[-1]).sum((-2, -1)) if quad else found
        return found, self.slopes(found, leaves)

    def slopes(self, found, leaves=None):
        leaves = leaves or self.leaves
        return torch.autograd.grad(found.sin().sum(), leaves) if found.requires_grad else []


@pytest.mark.parametrize(("candidate", "formed"), [("cholesky", True), ("preconditioned", False)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernel": RBFKernel, "each": True, "shape": (2, N, 1)},
        {"dtype": torch.float32},
        {"wanted": False, "shape": (N, 1)},
    ],
    ids=str,
)
def test_solutions_and_gradients_are_those_of_dense_algebra(candidate, formed, options):
    system = System(**options)
    truth, slopes = system.truth()
    double = system.x.dtype is torch.float64
    tolerance, bound = (1e-6, 1e-4) if double else (1e-3, 2e-2)
    with library.cg_tolerance(tolerance), autokern.enabled(), autokern.using(force={"solve": candidate}):
        found = system.matrix(formed).solve(system.rhs)
        own = system.slopes(found)
        assert autokern.stats()["solve"][candidate]
    assert far(found, truth) < bound
    assert all(far(one, exact) < 5 * bound for one, exact in zip(own, slopes, strict=True))


@pytest.mark.parametrize("change", ["lengthscale", "noise", "points"])
def test_what_is_kept_of_a_system_holds_for_its_values_alone(change):
    system = System(wanted=False)
    with autokern.enabled(), autokern.using(force={"solve": "preconditioned"}), torch.no_grad():
        for step in range(3):
            found = system.matrix(formed=False).solve(system.rhs)
            assert far(found, system.truth()[0]) < 1e-3
            if change == "lengthscale":
                system.kernel.base_kernel.lengthscale = 0.3 + 0.2 * step
            else:
                (system.noise if change == "noise" else system.x).mul_(1.5)


def test_what_has_no_factor_or_is_no_number_is_stocks_matter():
    system = System(wanted=False)
    k = system.kernel(system.x).to_dense()
    indefinite = AddedDiagLinearOperator(DenseLinearOperator(k - 5), DiagLinearOperator(system.noise.expand(N)))
    with torch.no_grad(), library.max_cg_iterations(20), warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        with autokern.enabled(), autokern.using(force={"solve": "cholesky"}):
            with mock.patch("linear_operator.utils.linear_cg", wraps=linear_operator.utils.linear_cg) as iterates:
                indefinite.solve(system.rhs)
            assert iterates.called
            with pytest.raises(RuntimeError, match="NaNs encountered"):
                indefinite.solve(system.rhs * float("nan"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_in_single_precision_serve_iterations_and_double_precision_checks_them(monkeypatch, dtype):
    monkeypatch.setattr(systems, "_LARGE", 500)
    system = System(dtype=dtype, wanted=False)
    system.kernel.base_kernel.lengthscale = 0.02
    matrix, whole, count = system.matrix(formed=False), [], matrix_free(system.kernel, system.x, system.x).__class__
    stock = count._matmul
    monkeypatch.setattr(count, "_matmul", lambda self, v: whole.append(1) or stock(self, v))
    seen, order = [], autokern.using(force={"solve": "preconditioned"})
    with autokern.enabled(), order, torch.no_grad(), collecting(seen.extend):
        found = matrix.solve(system.rhs)
    assert (2 * len(whole) < seen[-1].iterations) == (dtype is torch.float64), "in double precision they only check"
    truth, _ = system.truth()
    size = truth.norm(dim=0)
    assert ((found.double() - truth).norm(dim=0) <= 50 * TOLERANCE[dtype] * size).all()
    assert seen[-1].residual <= TOLERANCE[dtype]


def test_what_is_kept_of_a_system_lives_as_long_as_its_covariance():
    system = System(wanted=False)
    with autokern.enabled(), autokern.using(force={"solve": "preconditioned"}), torch.no_grad():
        matrix = system.matrix(formed=False)
        matrix.solve(system.rhs)
        (first,) = systems._latest.values()
        matrix.solve(system.rhs + 1)
        assert list(systems._latest.values()) == [first]
        del matrix
        gc.collect()
        assert not systems._latest


@pytest.mark.parametrize(("scale", "served"), [(1.001, True), (3, False)])
def test_a_poor_factor_is_refined_or_left_aside(scale, served, monkeypatch):
    system = System(wanted=False)
    factorise = solve.factorised
    monkeypatch.setattr(solve, "factorised", lambda k: (factorise(k)[0].mul_(scale), torch.tensor(0)))
    expected = system.matrix(formed=True).solve(system.rhs)
    with autokern.enabled(), autokern.using(force={"solve": "cholesky"}):
        found = system.matrix(formed=True).solve(system.rhs)
    assert found.equal(expected) is not served
    assert not served or far(found, system.truth()[0]) < 1e-5


def test_columns_reach_operators_with_a_structure_as_they_were_given(monkeypatch):
    seen, one = [], RBFKernel()(points(40).float()).to_dense().detach() + torch.eye(40)
    both = KroneckerProductLinearOperator(DenseLinearOperator(one), DenseLinearOperator(one)).expand(2, 1600, 1600)
    stock = type(both)._solve
    monkeypatch.setattr(type(both), "_solve", lambda s, rhs, *a, **k: seen.append(rhs.shape) or stock(s, rhs, *a, **k))
    rhs = points(1600, d=1).float()
    for switch in (contextlib.nullcontext, autokern.enabled):
        with switch(), torch.no_grad():
            both.solve(rhs)
    assert len(set(seen)) == 1


@pytest.mark.parametrize("where", ["matrix", "columns"])
def test_densities_of_no_numbers_raise_what_iterations_raise(where):
    system = System(wanted=False)
    k, rhs = system.kernel(system.x).to_dense().detach(), system.rhs.detach().clone()
    (k if where == "matrix" else rhs)[4, 3 if where == "matrix" else 0] = float("nan")
    operator = AddedDiagLinearOperator(DenseLinearOperator(k), DiagLinearOperator(system.noise.expand(N)))
    with autokern.enabled(), pytest.raises(RuntimeError, match="NaNs encountered"):
        operator.inv_quad_logdet(rhs, logdet=True)


def test_a_product_solves_by_the_library_where_a_transpose_is_patched(monkeypatch):
    factor = torch.eye(9, dtype=torch.float64) + points(9) @ points(9).mT
    product = KroneckerProductLinearOperator(DenseLinearOperator(factor), DenseLinearOperator(factor[:6, :6]))
    noisy, rhs = product.add_diagonal(factor.new_tensor(0.3)), torch.ones(54, 2, dtype=torch.float64)
    stock = DenseLinearOperator._transpose_nonbatch
    with autokern.enabled(), autokern.using(force={"solve": "eigenvalues"}):
        noisy.solve(rhs)
        assert autokern.stats()["solve"] == {"eigenvalues": 1}
    monkeypatch.setattr(DenseLinearOperator, "_transpose_nonbatch", lambda self: stock(self) * 1.5)
    patched = noisy.solve(rhs)
    with autokern.enabled(), autokern.using(force={"solve": "eigenvalues"}):
        torch.testing.assert_close(noisy.solve(rhs), patched, rtol=0, atol=0)
