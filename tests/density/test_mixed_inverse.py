"""Gradients by an inverse in single precision, against dense algebra in double."""

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from support.trees import KERNELS, leaves, problem

from autokern.density import gaussian
from autokern.density import mixed_inverse as mixed
from autokern.kernels import tree as trees


def both(given, by):
    """Return value and gradients, and those of the same factor with an inverse in double precision."""
    found = []
    for gradients in (by, None):
        value = gaussian.log_prob(*given, gradients=gradients)
        found.append((value.detach(), torch.autograd.grad(-3 * value, leaves(*given))))
    return found


def counted(monkeypatch):
    """Return a list that grows with the attempts, sums in single precision first, by whether they served."""
    served, single = [], mixed._by_single

    def attempt(*args, **how):
        found = single(*args, **how)
        served.append(found is not None)
        return found

    monkeypatch.setattr(mixed, "_by_single", attempt)
    return served


def gap(found, exact):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("each", [False, True])
def test_values_are_exact_and_gradients_nearly_so(kernel, each, monkeypatch):
    served = counted(monkeypatch)
    given = problem(kernel, 900, each=each)
    (value, found), (exact, truth) = both(given, mixed.Mixed())
    assert served[-1]
    assert value == exact
    assert gap(found, truth) < 1e-4


def test_only_what_is_wanted_is_returned():
    tree, noise, residual = problem("sum", 300)
    of = leaves(tree, noise, residual)
    truth = torch.autograd.grad(gaussian.reference(tree, noise, residual), of)
    for wanted in (0, 1, 2, len(of) - 1):
        for index, one in enumerate(of):
            one.requires_grad_(index == wanted)
        value = gaussian.log_prob(tree, noise, residual, gradients=mixed.Mixed())
        assert gap(torch.autograd.grad(value, of[wanted]), truth[wanted : wanted + 1]) < 1e-4


@pytest.mark.parametrize("change", [{"noise": 1e-9}, {"scale": 1e-80}, {"scale": 1e80}])
def test_what_single_precision_does_not_hold_is_noticed(change, monkeypatch):
    served, by = counted(monkeypatch), mixed.Mixed()
    monkeypatch.setattr(mixed, "_RESTS", 3)
    given = problem("bare" if "noise" in change else "matern52", 400, **change)
    for _ in range(5):
        (_, found), (_, truth) = both(given, by)
        assert all(map(torch.equal, found, truth))
    assert served == [False] * 4  # twice in either sums; the steps between them tried nothing


def test_smooth_kernels_with_little_noise_have_their_inverse_summed_in_double(monkeypatch):
    served = counted(monkeypatch)
    monkeypatch.setattr(mixed, "_RESTS", 3)
    given, by = problem("bare", 900, noise=1e-4), mixed.Mixed()
    for _ in range(3):
        (_, found), (_, truth) = both(given, by)
        assert gap(found, truth) < 1e-5
    assert served == [False, True, True, True]  # single precision is not tried in every step


def smooth_beside_rough():
    """Return a sum on a line whose smooth term has few degrees of freedom beside those of the rough one."""
    draw = torch.Generator().manual_seed(1)
    x = torch.linspace(0, 1, 1000, dtype=torch.float64)[:, None]
    residual = (6 * x[:, 0]).sin() + 0.2 * torch.randn(1000, generator=draw, dtype=torch.float64)
    smooth, rough = ScaleKernel(RBFKernel()).double(), MaternKernel(0.5).double()
    smooth.base_kernel.lengthscale, smooth.outputscale, rough.lengthscale = 14.19, 1.335, 1.882
    with torch.no_grad():
        tree = trees.read(smooth + rough, x)
    tree = tree.each(lambda t: t.detach().clone().requires_grad_())
    return tree, torch.tensor([1.4e-5], dtype=torch.float64).requires_grad_(), residual.requires_grad_()


@pytest.mark.parametrize("looks", [False, True])
def test_no_hyperparameter_of_a_sum_is_off_where_others_hide_it(looks, monkeypatch):
    served = counted(monkeypatch)
    if not looks:
        monkeypatch.setattr(mixed, "OF_EACH", float("inf"))
    given = smooth_beside_rough()
    (_, found), (_, truth) = both(given, mixed.Mixed())
    (_, traces) = both((*given[:2], torch.zeros_like(given[2]).requires_grad_()), None)[1]
    weight = len(leaves(*given)) - 1
    size = max(abs(traces[weight].item()), abs((truth[weight] - traces[weight]).item()))
    off = abs((found[weight] - truth[weight]).item()) / size
    assert served[0] is not looks
    assert (off > 1e-2) is not looks  # without a look, it is off by more than the bound
    assert not looks or off < 1e-3


@pytest.mark.parametrize("missed", ["OF_TRACE", "OF_SOLUTION", "OF_EACH"])
def test_either_identity_asks_for_double_precision(missed, monkeypatch):
    served = counted(monkeypatch)
    monkeypatch.setattr(mixed, missed, 1e-12)
    (_, found), (_, truth) = both(problem("sum", 300), mixed.Mixed())
    assert served == [False, False]
    assert all(map(torch.equal, found, truth))
