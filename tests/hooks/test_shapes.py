"""Broadcasts of shapes are torch's own: results, types and errors."""

import pickle
from pathlib import Path

import pytest
import support
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.outcomes import outcome
from support.programs import said

import autokern
from autokern.hooks.torch import stock

SIZES = st.lists(st.sampled_from([0, 1, 1, 2, 3, 7, -1]), max_size=4)
SHAPES = st.one_of(
    SIZES.map(torch.Size).filter(lambda s: all(size >= 0 for size in s)), SIZES.map(tuple), SIZES, st.just(3), st.none()
)


def ended(function, shapes):
    """What a call returns or raises, and of which type that is."""
    found = outcome(function, *shapes)
    return type(found[0]), found


@settings(max_examples=100, deadline=None)
@given(st.lists(SHAPES, max_size=4))
@example([(True,), (2,)])
@example([(2.0,), (2,)])
@example(["ab", (2,)])
@example([torch.tensor([2]), (2,)])
@example([(None,)])
def test_results_and_errors_are_torchs(shapes):
    expected = ended(stock, shapes)
    with autokern.enabled():
        assert ended(torch.broadcast_shapes, shapes) == expected
    assert ended(torch.broadcast_shapes, shapes) == expected


def test_compiled_and_traced_functions_have_torchs():
    def double(x, y):
        return (x + y).expand(torch.broadcast_shapes(x.shape, y.shape))

    x, y = torch.ones(3, 1), torch.ones(1, 4)
    with autokern.enabled():
        compiled = torch.compile(double, backend="eager", dynamic=True, fullgraph=True)
        assert compiled(x, y).shape == (3, 4)
        assert compiled(torch.ones(5, 1), y).shape == (5, 4)


def test_it_stays_the_same_function():
    before, stock = torch.broadcast_shapes, scripted()
    with autokern.enabled():
        assert torch.broadcast_shapes is before is torch.functional.broadcast_shapes
        assert pickle.loads(pickle.dumps(before)) is before
        assert scripted() == stock


def scripted():
    """Return the shape by TorchScript, or the error: TorchScript of torch 2.11 has no such function."""

    def expanded(x: torch.Tensor, y: torch.Tensor):  # a new one, since torch keeps what it has compiled
        return x.expand(torch.broadcast_shapes(x.shape, y.shape))

    return outcome(lambda: torch.jit.script(expanded)(torch.ones(3, 1), torch.ones(1, 2)).shape)[0]


@pytest.mark.slow
def test_a_program_needs_no_computer_algebra():
    program = f"""
import sys
sys.path.insert(0, {str(Path(support.__path__[0]).parent)!r})
import autokern.auto
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from support.models import loss_of, points, rough, step
model = rough(20)
step(model)
loss = loss_of(ExactMarginalLogLikelihood(model.likelihood, model))
slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
sum(slope.square().sum() for slope in slopes).backward()
model.likelihood(model.eval()(points(5))).variance
from autokern.hooks import gpytorch as hooks
from support.losses import called, prepared, sparse
hooks._ENOUGH_VARIATIONAL = 0.0
loss, output = called(prepared(sparse), 9)
output.variance.sum().backward()
assert type(output.loc.grad_fn).__name__ == "_AgainBackward"
print("sympy" in sys.modules)
"""
    assert said(program)[-1] == "False"
