"""What the tests of readings share: a model, whether it is read, and whether it computes what the library does."""

import gpytorch
import torch
from gpytorch.kernels import RBFKernel
from support import densities
from support.densities import D
from support.models import loss_of

from autokern.density.exact_objective import Reading
from autokern.model.arrays import UnreadError


def read(mll):
    """The reading of a model, None where it is not exactly known."""
    try:
        made = Reading(mll)
    except UnreadError:
        return None
    return made if made.holds() else None


class Model(densities.Model):
    """As the tutorials write it."""

    def forward(self, x):
        mean_x = self.mean_module(x)
        covar_x = self.covar_module(x)
        return gpytorch.distributions.MultivariateNormal(mean_x, covar_x)


def made(kernel=None, mean=None, likelihood=None, n=13, kind=Model):
    return densities.made(kernel or RBFKernel(ard_num_dims=D), mean, likelihood, n, kind=kind)


def agree(mll, reading=None, digits=1.0):
    """Value and gradients of a reading, a new one or one from before a change, are the library's."""
    reading = reading or Reading(mll)
    assert reading.holds()
    parameters = {name: p for name, p in mll.named_parameters() if p.requires_grad}
    assert reading.covers(parameters)
    expected = loss_of(mll)
    slopes = torch.autograd.grad(expected.sum(), list(parameters.values()))
    found, gradients = reading.evaluate(parameters)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12 * digits, atol=1e-12 * digits)
    atol = 1e-11 * digits * max(g.abs().max().item() for g in slopes)
    for name, one, other in zip(parameters, gradients, slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9 * digits, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    return reading
