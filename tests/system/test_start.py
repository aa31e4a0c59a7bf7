"""What importing autokern leaves: the garbage collector as it was, and no tensor."""

import gc
import sys

import pytest
from support.programs import PATH, said

from autokern.system import start

STATE = f"import gc; print(gc.isenabled(), gc.get_freeze_count() >= {start._BORN})"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "state"),
    [
        ("pass", ["True", "True"]),
        ("import torch", ["True", "False"]),  # the program may have made anything since
        ("import gc; gc.disable()", ["False", "False"]),
        ("import gc; gc.freeze()", ["True", "True"]),
    ],
)
def test_what_the_import_creates_is_frozen_if_the_program_has_set_nothing(before, state):
    assert said(f"{before}\nimport autokern.auto\n{STATE}")[-2:] == state


@pytest.mark.slow
def test_the_collector_sees_what_the_program_created_before_and_after():
    program = """
import gc, weakref
class Data:
    def __init__(self):
        self.me = self
def imported():
    data = Data()
    import autokern.auto
    return weakref.ref(data)
before = Data()
one, other, local = weakref.ref(before), weakref.ref(Data()), imported()
assert any(one is before for one in gc.get_objects(generation=2))
del before
gc.collect()
print(one() is other() is local() is None)
"""
    assert said(program)[-1] == "True"


@pytest.mark.parametrize("ours", [True, False])
def test_finalizers_run_at_the_end_though_a_frozen_object_holds_theirs(monkeypatch, ours):
    """An open file, or any object with a finalizer, makes the end of the process that of stock."""
    calls = []

    class Finalized:
        def __del__(self):
            pass

    kept = [] if ours else [Finalized()]
    monkeypatch.setattr(gc, "get_objects", lambda: [*kept, sys.__stdout__, (one for one in kept)])
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    start._unfreeze_for_finalizers()
    assert calls == ([] if ours else ["unfreeze"])


def test_an_import_that_fails_leaves_the_collector_as_it_was():
    failing = "import sys; sys.modules['linear_operator'] = None"
    told = said(f"{failing}\ntry:\n    import autokern\nexcept ImportError:\n    pass\n{STATE}")
    assert told[-2:] == ["True", "False"]


@pytest.mark.slow
def test_files_that_a_program_leaves_open_are_written_at_the_end(tmp_path):
    program = f"""
import sys
def opened(name):
    file = open({str(tmp_path)!r} + "/" + name, "w")
    file.write("hello")
    return file
before = opened("before")
import autokern.auto, gpytorch, torch
class Data: pass
data = Data()
data.me, data.file = data, opened("cycle")
torch.kept = opened("library")
gpytorch.kernels.scale_kernel.kept = opened("module")
after = opened("after")
"""
    said(program)
    names = ["after", "before", "cycle", "library", "module"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(names, "hello")


PROGRAM = f"""
import gc, importlib, pkgutil, sys
import torch
sys.path[:0] = {PATH!r}

def ours():
    gc.collect()
    return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

import gpytorch
import gpytorch.metrics
from support.models import ExactModel, step
before = ours()
import autokern
for module in pkgutil.walk_packages(autokern.__path__, "autokern."):
    if not any(word in module.name for word in ("__main__", ".cli", ".auto")):
        importlib.import_module(module.name)
autokern.enable()
print(ours() - before)

def use(n):
    x = torch.linspace(0, 1, n)[:, None]
    model = ExactModel(x, torch.sin(6 * x[:, 0]), gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel()))
    for _ in range(2):
        step(model)
    with torch.no_grad():
        model.eval()(x[:5]).variance
    kernel = model.covar_module.double()
    kernel(x.double()).add_jitter(0.1).inv_quad_logdet(x.double(), logdet=True)[1].backward()

use(20)
use(150)
print(ours() - before)
"""


def test_no_tensor_stays():
    """BoTorch's own suite counts those that the collector knows before and after a call."""
    assert said(PROGRAM)[-2:] == ["0", "0"]
