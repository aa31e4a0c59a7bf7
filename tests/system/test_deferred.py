"""Torch's rules for tensors without data: deferred while autokern imports torch, and there for whatever needs them."""

from __future__ import annotations

import json
import os

import pytest
from support import first_uses
from support.programs import BARE, python, said

import autokern

ARMED = "sys.meta_path[0].__class__.__name__ == 'Deferred', 'torch._refs' in sys.modules"
DEFERRED, THERE = ["True", "False"], ["False", "True"]
FEW = ["a tensor", "functions", "a primitive", "an import"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each use is the first of a forked process")
@pytest.mark.parametrize("names", [FEW, pytest.param([*first_uses.USES], marks=pytest.mark.slow)], ids=["few", "all"])
def test_whatever_needs_the_rules_first_finds_them(names):
    theirs, ours = (python(first_uses.__file__, word, *names, check=True).stdout.splitlines() for word in ("off", "on"))
    assert ours == theirs
    assert len(ours) >= len(names)


def test_the_rules_have_no_other_kernels_than_those_of_the_device():
    program = """
import contextlib, json, sys
if sys.argv[1] == "on":
    import autokern.auto
import torch
found = {}
for key in vars(torch._C.DispatchKey):
    with contextlib.suppress(RuntimeError):  # no name of a key
        found[key] = torch._C._dispatch_get_registrations_for_dispatch_key(key)
print(json.dumps(found))
"""
    theirs, ours = (json.loads("".join(said(program, word))) for word in ("off", "on"))
    assert len(theirs) > 50
    assert {key for key, names in theirs.items() if set(names) != set(ours[key])} <= {"Meta", "MPS"}


@pytest.mark.parametrize(
    ("program", "state"),
    [
        ("import autokern.auto", DEFERRED),
        ("import torch, autokern.auto", THERE),
        ("import os; os.environ['AUTOKERN'] = 'Off '\nimport autokern.auto", THERE),
        ("import autokern.auto, torch._dynamo", THERE),
    ],
)
def test_when_they_are_deferred(program, state):
    assert (
        said(f"{program}\nimport sys; print({ARMED})", PYTHONPATH=os.path.dirname(autokern.__path__[0]))[-2:] == state
    )


@pytest.mark.parametrize("other", ["_is_tested = lambda: False", "_CREATING = ('empty.of_another_release',)"])
def test_a_release_that_is_unknown_or_lacks_a_name_has_them_at_once(other):
    program = f"""{BARE}
from autokern.system import deferred
deferred.{other}
with deferred.rules():
    import torch
print(torch.linalg.eigh(torch.empty(3, 3, device="meta"))[0].device, {ARMED})
"""
    assert said(program)[-3:] == ["meta", *THERE]


def test_an_import_that_is_interrupted_is_made_again():
    program = """
import autokern.auto, sys, torch
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._decomp":
            raise KeyboardInterrupt
waiting, one = sys.meta_path[0], Interrupts()
sys.meta_path.insert(1, one)
try:
    torch.empty(2, device="meta")
except KeyboardInterrupt:
    print("interrupted", sys.meta_path[0] is waiting)
sys.meta_path.remove(one)
print(torch.linalg.eigh(torch.empty(3, 3, device="meta"))[0].device, waiting in sys.meta_path)
"""
    assert said(program)[-4:] == ["interrupted", "True", "meta", "False"]
