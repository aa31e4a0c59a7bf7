"""Broadcasts of shapes are torch's own; optimizers take the same steps without torch's compiler as with it."""

import pickle
from pathlib import Path

import pytest
import support
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.outcomes import outcome
from support.programs import QUIET, python, said

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


PROGRAM = """
import sys
import torch, gpytorch
kinds = [
    kind for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]
methods = {(kind, name): vars(kind).get(name) for kind in (*kinds, torch.optim.Optimizer)
           for name in ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict")}
mode = sys.argv[1]
if mode != "off":
    import autokern.auto
if mode == "compiler":
    import torch._dynamo

def hooked():
    class Mine(torch.optim.Adam):
        def step(self, closure=None):
            return super().step(closure)
    calls = []
    made = Mine([torch.nn.Parameter(torch.ones(2))])
    made.register_step_post_hook(lambda *args: calls.append(1))
    made.step()
    return len(calls)
assert hooked() == 1

def lives(kind):
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.rand(4, 3))
    options = {"lr": 0.01} if kind is not torch.optim.SparseAdam else {}
    try:
        made = kind([weights], **options)
        for turn in range(4):
            def closure():
                made.zero_grad(set_to_none=bool(turn % 2))
                loss = (weights * torch.arange(3)).sin().sum() ** 2
                loss.backward()
                return loss
            closure()
            before = torch.is_grad_enabled()
            made.step(closure) if turn % 2 or kind is torch.optim.LBFGS else made.step()
            assert torch.is_grad_enabled() is before
            if turn == 1:
                made.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2))]})
            if turn == 2:
                made.load_state_dict(made.state_dict())
        return weights.sum().item()
    except Exception as error:
        return type(error).__name__, str(error)[:60]

found = {kind.__name__: lives(kind) for kind in kinds}
there = "torch._dynamo" in sys.modules
if mode == "on":
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    assert compiled(torch.ones(2)).sum() == 4
    assert hooked() == 2  # torch wraps the step of Adam as soon as one was made, and a subclass wraps its own
    autokern.disable()
    left = [key for key, stock in methods.items() if vars(key[0]).get(key[1]) is not stock and key[1] != "step"]
    assert left == [], left
print(repr((found, there)))
"""


def told(mode):
    return eval(python(*QUIET, "-c", PROGRAM, mode, check=True).stdout.splitlines()[-1])


@pytest.mark.slow
def test_steps_are_the_same_and_nothing_is_imported_for_them():
    expected, there = told("off")
    assert there
    assert len(expected) > 10
    assert told("on") == (expected, False)
    assert told("compiler") == (expected, True), "where it was imported before"
