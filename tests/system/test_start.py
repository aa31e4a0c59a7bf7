"""start.py: what importing autokern does to the collector and to pykeops, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

GARBAGE = """
import gc, weakref

class Data:
    def __init__(self):
        self.me = self

def is_freed(data):
    seen = weakref.ref(data)
    del data
    gc.collect()
    return seen() is None
"""


def told(*lines, options=()):
    """What a program prints."""
    command = [sys.executable, "-W", "ignore", *options, "-c", "\n".join(lines)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


FROZEN = "print(bool(gc.get_freeze_count()), gc.isenabled())"


@pytest.mark.parametrize(
    ("before", "frozen"),
    [
        ("import autokern.auto", True),
        ("from __future__ import annotations\nimport math\nfrom typing import Any\nSIZE = 3\nimport autokern", True),
        ("import torch, gpytorch\nimport autokern", True),
        ("points = [[1.0, 2.0]]\nimport autokern", False),
        ("def main():\n    import autokern\nmain()", False),
    ],
)
def test_the_libraries_are_frozen_while_the_program_has_no_data(before, frozen):
    assert told(before, "import gc", FROZEN)[-2:] == [str(frozen), "True"]


def test_a_collector_that_the_user_has_switched_off_stays_off():
    assert told("import gc; gc.disable()", "import autokern", FROZEN) == ["False", "False"]


def test_what_the_user_has_frozen_stays_as_it_is():
    count = "print(gc.get_freeze_count())"
    before, after = told("import gc; gc.freeze()", count, "import autokern", count)
    assert int(after) <= int(before)


def test_garbage_of_the_user_is_collected():
    after = told("import autokern.auto", GARBAGE, "print(is_freed(Data()))")
    before = told("import torch", GARBAGE, "one = [Data()]", "import autokern.auto", "print(is_freed(one.pop()))")
    assert after == before == ["True"]


KEOPS = """
from gpytorch.kernels import keops, RBFKernel
from gpytorch.kernels.keops import keops_kernel
import gpytorch, sys, torch
x = torch.linspace(0, 1, 40).unsqueeze(-1)
print("pykeops" in sys.modules)
with gpytorch.settings.max_cholesky_size(10), torch.no_grad():
    found = keops.RBFKernel()(x) @ torch.ones(40, 1)
print(torch.allclose(found, RBFKernel()(x) @ torch.ones(40, 1), rtol=1e-5))
print("pykeops" in sys.modules, keops_kernel.LazyTensor.__module__)
"""


def test_pykeops_is_imported_when_a_kernel_needs_it():
    pytest.importorskip("pykeops")
    words = told("import autokern", KEOPS)
    assert words[0] == "False"
    assert words[-3:] == ["True", "True", "pykeops.torch.lazytensor.LazyTensor"]  # KeOps talks about GPUs between


def test_pykeops_that_cannot_be_imported_leaves_the_kernel_without_it():
    broken = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("keopscore"):
            raise ImportError(name)
sys.meta_path.insert(0, Broken())
"""
    pytest.importorskip("pykeops")
    found = told("import autokern", broken, KEOPS)
    assert found[:2] == ["False", "True"]
    assert (
        told("import autokern", broken, "from autokern.system import keops; print(keops.keops_problem())")[-1]
        == "fails"
    )


def test_the_candidate_imports_pykeops_without_a_word():
    pytest.importorskip("pykeops")
    asked = "from autokern.system import keops; keops.keops_problem()"
    assert told("import autokern, sys", asked, "print('pykeops' in sys.modules)") == ["True"]
