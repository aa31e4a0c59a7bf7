"""The batch shape of a kernel is the library's, whatever is in the kernel and whoever redefines a part of it."""

import contextlib
import copy
import pickle

import pytest
import torch
from botorch.models.kernels.orthogonal_additive_kernel import OrthogonalAdditiveKernel
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy

import autokern
from autokern.hooks.kernels import _stock_shape

TWO, THREE = torch.Size([2]), torch.Size([3, 1])


class Own(RBFKernel):
    """A kernel of a user, whose batch shape is another."""

    batch_shape = property(lambda self: torch.Size([5]), lambda self, shape: None)


class Blind(ScaleKernel):
    """A kernel that hides what is in it."""

    def named_sub_kernels(self):
        return iter(())


class Described(RBFKernel):
    """A kernel of a user that computes the attribute below its batch shape."""

    _batch_shape = property(lambda self: torch.Size([6]), lambda self, shape: vars(self).update(_batch_shape=shape))


def unmade():
    kernel = RBFKernel.__new__(RBFKernel)
    vars(kernel)["_batch_shape"] = TWO
    return kernel


def redefined(kernel):
    kernel.sub_kernels = lambda: iter(())
    return kernel


def of(shape, *more):
    kernel = ScaleKernel(RBFKernel(batch_shape=shape) + LinearKernel(batch_shape=shape), batch_shape=shape)
    return kernel * sum(more, MaternKernel(batch_shape=shape))


KERNELS = {
    "leaf": RBFKernel(), "nested": of(torch.Size()), "batch": of(TWO), "several": of(TWO, RBFKernel(batch_shape=THREE)),
    "list": ScaleKernel(RBFKernel(batch_shape=[2])), "leaf of a list": RBFKernel(batch_shape=[2]),
    "own": of(TWO, Own()), "blind": Blind(RBFKernel(batch_shape=TWO)), "twice": RBFKernel() + ScaleKernel(of(TWO)),
    "redefined": redefined(ScaleKernel(RBFKernel(batch_shape=TWO))),
    "described": Described(), "in a kernel": ScaleKernel(Described(), batch_shape=torch.Size([6])), "unmade": unmade(),
    "orthogonal": OrthogonalAdditiveKernel(2, dtype=torch.float64),
}  # fmt: skip


def told(kernel):
    try:
        return kernel.batch_shape, type(kernel.batch_shape)
    except (RuntimeError, AttributeError) as error:
        return str(error)


KERNELS["conflict"] = ScaleKernel(RBFKernel(), batch_shape=TWO)
KERNELS["conflict"].base_kernel.batch_shape = torch.Size([3])


@pytest.mark.parametrize("name", KERNELS)
def test_a_batch_shape_is_the_librarys(name):
    kernel = KERNELS[name]
    expected = told(kernel)
    with autokern.enabled():
        assert told(kernel) == expected
        assert told(copy.deepcopy(kernel)) == expected
        with contextlib.suppress(AttributeError):  # some have no setter
            kernel.batch_shape = THREE
        changed = told(kernel)
    assert told(kernel) == changed
    assert Kernel.__dict__["batch_shape"] is _stock_shape


def test_a_patched_walk_is_followed(monkeypatch):
    kernel = of(TWO)
    with autokern.enabled():
        assert pickle.loads(pickle.dumps(kernel)).batch_shape == TWO
        monkeypatch.setattr(Kernel, "named_sub_kernels", lambda self: iter(()))
        assert ScaleKernel(RBFKernel(batch_shape=TWO)).batch_shape == torch.Size()


@pytest.mark.parametrize(("owner", "name"), [(Kernel, "batch_shape"), (DefaultPredictionStrategy, "covar_cache")])
def test_a_property_has_the_librarys_docstring_and_errors(owner, name):
    found = []
    for context in (contextlib.nullcontext(), autokern.enabled()):
        with context:
            with pytest.raises(AttributeError) as error:
                delattr(object.__new__(owner), name)
            found.append((str(error.value), vars(owner)[name].__doc__))
    assert found[0] == found[1]
