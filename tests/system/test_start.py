"""What importing autokern leaves: the garbage collector as it was, and no tensor."""

from __future__ import annotations

import gc

import pytest
from support.programs import said

from autokern.system import start

STATE = f"import gc; print(gc.isenabled(), gc.get_freeze_count() >= {start._BORN})"


@pytest.mark.slow
def test_the_collector_pauses_and_goes_on():
    assert said("import autokern, gc; print(gc.get_stats()[2]['collections'])")[-1] == "0"
    assert said(f"import autokern.auto\n{STATE}")[-2:] == ["True", "False"]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "state"), [("disable", ["False", "False"]), ("freeze", ["True", "True"])])
def test_what_the_user_has_set_stays(before, state):
    assert said(f"import gc; gc.{before}(); import autokern\n{STATE}")[-2:] == state


@pytest.mark.parametrize(("frozen", "moved"), [(0, True), (375, True), (4000, False)])
def test_an_interpreter_may_have_frozen_objects_of_its_own(monkeypatch, frozen, moved):
    """Python 3.12 starts with 375; 4,000 are the program's."""
    calls = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    with start.importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert calls == (["freeze", "unfreeze"] if moved else [])


def test_an_import_that_fails_leaves_the_collector_as_it_was():
    failing = "import sys; sys.modules['linear_operator'] = None"
    told = said(f"{failing}\ntry:\n    import autokern\nexcept ImportError:\n    pass\n{STATE}")
    assert told[-2:] == ["True", "False"]


@pytest.mark.slow
def test_garbage_is_collected_and_files_are_written_at_the_end(tmp_path):
    path = tmp_path / "told.txt"
    program = f"""
import gc, weakref
class Data:
    def __init__(self):
        self.me = self
before = Data()
import autokern.auto
one, other = weakref.ref(before), weakref.ref(Data())
del before
gc.collect()
print(one() is None, other() is None)
def function(): pass
file = open({str(path)!r}, "w")
file.write("hello")
"""
    assert said(program)[-2:] == ["True", "True"]
    assert path.read_text() == "hello"


PROGRAM = """
import gc, importlib, pkgutil
import torch

def ours():
    gc.collect()
    return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

import gpytorch
import gpytorch.metrics
before = ours()
import autokern
for module in pkgutil.walk_packages(autokern.__path__, "autokern."):
    if not any(word in module.name for word in ("__main__", ".cli", ".auto")):
        importlib.import_module(module.name)
autokern.enable()
print(ours() - before)

class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

def use(n):
    x = torch.linspace(0, 1, n)[:, None]
    model = Model(x, torch.sin(6 * x[:, 0]))
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    for _ in range(2):
        (-mll(model(x), model.train_targets)).backward()
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
