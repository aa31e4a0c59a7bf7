"""Roots and exponentials in either way that a CPU may prefer."""

import pytest
import torch

from autokern.kernels import stationary
from autokern.kernels.family import family


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_either_way_is_right_to_rounding(slow, dtype, monkeypatch):
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


@pytest.mark.parametrize("name", ["matern12", "matern32", "matern52", "rbf"])
def test_families_do_not_depend_on_the_way(name, monkeypatch):
    of = family(name)
    u = torch.cat((torch.zeros(1), torch.logspace(-20, 3, 500))).double() * (-1 if of.gamma < 0 else 1)
    found = []
    for slow in (True, False):
        monkeypatch.setattr(stationary, "_is_slow", lambda slow=slow: slow)
        slope = torch.empty_like(u)
        found.append((of.epilogue(u.clone(), slope), slope, of.epilogue(u.clone(), None)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15)
