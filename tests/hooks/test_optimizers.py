"""Optimizers take the same steps without torch's compiler, and with it once it is there."""

import functools

import pytest
from support.programs import QUIET, python

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


@functools.cache
def told(mode):
    return eval(python(*QUIET, "-c", PROGRAM, mode, check=True).stdout.splitlines()[-1])


@pytest.mark.slow
def test_steps_are_the_same_and_nothing_is_imported_for_them():
    expected, there = told("off")
    assert there
    assert len(expected) > 10
    found, there = told("on")
    assert not there
    assert found == expected


@pytest.mark.slow
def test_steps_are_the_same_where_the_compiler_was_imported_before():
    assert told("compiler") == (told("off")[0], True)
