"""Models that no hook serves: a step costs few questions, and is stock's to the last bit."""

import contextlib
import copy
from collections import Counter

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import RBFKernel, RBFKernelGrad, ScaleKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, ConstantMeanGrad
from support.losses import Model, independent
from support.models import step
from support.outcomes import assert_close

import autokern
from autokern.core.releases.known import Relied
from autokern.hooks import install
from autokern.model.libraries import prediction

TWO = torch.Size([2])


class Own(RBFKernel):
    """A kernel of the user's."""


PARTS = {
    "derivatives": lambda: (ScaleKernel(RBFKernelGrad()), ConstantMeanGrad(), MultitaskMultivariateNormal),
    "batch": lambda: (ScaleKernel(Own(batch_shape=TWO), batch_shape=TWO), ConstantMean(batch_shape=TWO), independent),
}
each_kind = pytest.mark.parametrize("kind", PARTS)


def made(kind, dtype):
    x = torch.linspace(0.0, 5.0, 12, dtype=dtype).unsqueeze(-1)
    return Model(x, torch.cat([x.sin(), x.cos()], -1), MultitaskGaussianLikelihood(2), *PARTS[kind]()).to(dtype)


@contextlib.contextmanager
def asked():
    """How often the hooks asked whether all is known, by what is to be known."""
    with pytest.MonkeyPatch.context() as patching:
        found, holds = Counter(), Relied.holds
        patching.setattr(Relied, "holds", lambda self: found.update([id(self)]) or holds(self))
        yield found


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_of_a_model_that_no_hook_serves(kind, dtype):
    model = made(kind, dtype)
    expected = step(copy.deepcopy(model))
    with autokern.enabled(), autokern.using(force={"kernel_matrix": "stock"}):
        step(model)
        with asked() as questions:
            found = step(model)
    assert_close(found, expected, rtol=0, atol=0)
    assert questions.total() <= 5


@each_kind
@pytest.mark.parametrize("fast", [True, False])
def test_a_prediction_that_no_hook_serves(kind, fast):
    """What predictions rely on is hundreds of functions: the first look at them takes longer than the prediction."""
    model = made(kind, torch.float32).eval()

    def predicted(model):
        with torch.no_grad(), gpytorch.settings.fast_pred_var(fast):
            found = [model(model.train_inputs[0][:k] + 0.1) for k in (3, 5)]
            return [t for one in found for t in (one.mean, one.covariance_matrix)]

    expected = predicted(copy.deepcopy(model))
    with autokern.enabled(), asked() as questions:
        found = predicted(model)
    assert not questions[id(prediction)]
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_an_idle_hook_asks_nothing(monkeypatch):
    kernel, x = RBFKernel(), torch.rand(5, 2)
    monkeypatch.setattr(Relied, "holds", lambda self: pytest.fail("asked"))
    with autokern.enabled():
        kernel.covar_dist(x1=x, x2=x)
        kernel.covar_dist(x, x, True, False)


def test_a_hook_that_asks_by_itself_takes_all_that_its_release_takes():
    """One with arguments that the hook does not know is asked first whether all is known (T14 passes such ones)."""

    def hooked(self, value):
        return value

    def newer(self, value, anew=None):
        return value

    assert install._takes_all(hooked, hooked)
    assert not install._takes_all(hooked, newer)
    assert not install._takes_all(hooked, lambda self, *values: values)
    assert not install._takes_all(hooked, lambda self: self), "it dropped one"
    assert not install._takes_all(hooked, lambda self, other: other), "it renamed one"
    assert not install._takes_all(hooked, lambda self, value=None: value), "it needs one no more"
    assert not install._takes_all(lambda self, value, **kwargs: value, lambda self, **kwargs: kwargs)
    assert install._takes_all(lambda self, *args, **kwargs: args, newer)
