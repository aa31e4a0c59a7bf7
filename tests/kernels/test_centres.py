"""A far or missing point is a matter of its own row and column, as in stock; redefined distances are stock's."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel

import autokern

KINDS = [RBFKernel, MaternKernel, RQKernel, PeriodicKernel]


def pair(kernel, *points, forced="gemm"):
    """The matrix by autokern and by stock."""
    with torch.no_grad():
        expected = kernel(*points).to_dense()
        with autokern.enabled(), autokern.using(force={"kernel_matrix": forced}):
            return kernel(*points).to_dense(), expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("away", [1e6, 1e12, float("nan")])
def test_sets_of_a_batch_have_centres_of_their_own(kind, away):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(4, 30, 2, generator=generator, dtype=torch.float64)
    x[2:] += away
    found, expected = pair(kind().double(), x, torch.rand(20, 2, generator=generator, dtype=torch.float64))
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("odd", [1e8, 1e17, float("inf"), float("nan")])
@pytest.mark.parametrize("forced", ["gemm", "tiled"])
def test_an_odd_point_changes_no_other_row(odd, forced):
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.rand(n, 1, generator=generator, dtype=torch.float64) for n in (90, 70))
    x[5] = odd
    others = torch.arange(90) != 5
    found, expected = pair(PeriodicKernel().double(), x, y, forced=forced)
    torch.testing.assert_close(found[others], expected[others], rtol=0, atol=1e-12)
    assert torch.equal(found[5].isnan(), expected[5].isnan())


def test_short_lengthscales_of_a_periodic_kernel():
    kernel = PeriodicKernel().double()
    kernel.lengthscale, kernel.period_length = 1e-4, 50.0
    x = torch.rand(60, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found, expected = pair(kernel, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [*KINDS, lambda: ScaleKernel(RQKernel())])
def test_arguments_by_position_and_points_in_one_dimension(kind):
    kernel, x = kind(), torch.rand(5, 1, generator=torch.Generator().manual_seed(4))

    def outcomes():
        found = []
        for args in ((x, x, False), (x, x, True), (x, x, False, False), (x, x, True, False), (x[:, 0], x[:, 0])):
            try:
                found.append(kernel.forward(*args).detach())
            except Exception as error:
                found.append(type(error))
        return found

    expected = outcomes()
    with autokern.enabled():
        found = outcomes()
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, type):
            assert one is other
        else:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_distances_that_an_instance_redefines(kind):
    kernel = kind().double()
    stock = kernel.covar_dist
    kernel.covar_dist = lambda *args, **kwargs: 2 * stock(*args, **kwargs)
    x, y = (torch.rand(n, 2, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (12, 9))
    found, expected = pair(kernel, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
