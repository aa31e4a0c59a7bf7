"""Ops that are imported when they are first asked for: under mocks, interrupted, beside other threads, compiled."""

from __future__ import annotations

import pytest
from support.programs import python

PROGRAM = """
import importlib, sys, threading, warnings
from unittest import mock
warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=DeprecationWarning)
import torch
import autokern
from autokern.core import registry
from linear_operator.utils import cholesky as _
library = sys.modules["linear_operator.utils.cholesky"]
a = 2 * torch.eye(4, dtype=torch.float64)

# an interrupt in the middle of an import leaves an op that is imported again
stock = registry.add
def interrupted(op):
    stock(op)
    raise KeyboardInterrupt
with mock.patch.object(registry, "add", interrupted):
    try:
        autokern.op("fantasy")
        raise AssertionError("was imported already")
    except KeyboardInterrupt:
        pass
found = []
threads = [threading.Thread(target=lambda: found.append(autokern.op("fantasy").names())) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == [found[0]] * 8 and len(found[0]) > 1, found

# a mock that is there at the first call is not taken for the library's own function
with mock.patch.dict(sys.modules, {"nothing": mock.MagicMock()}), mock.patch.object(library, "_psd_safe_cholesky"):
    assert isinstance(autokern.linalg.cholesky(a), torch.Tensor)
with autokern.using(force={"cholesky": "stock"}):
    assert autokern.linalg.cholesky(a)[0, 0] == 2**0.5
assert autokern.op("qr").names()[0] == "stock"

# a function that is compiled as a whole runs stock
compiled = torch.compile(lambda m: autokern.linalg.qr(m)[0], fullgraph=True, backend="eager")
assert compiled(torch.eye(3)).shape == (3, 3)
print("right")
"""


@pytest.mark.slow
def test_ops_are_imported_whole_whatever_happens_meanwhile():
    told = python("-c", PROGRAM)
    assert told.stdout.split()[-1:] == ["right"], told.stderr


@pytest.mark.slow
def test_a_plugin_may_enable_autokern(tmp_path):
    (tmp_path / "eager.py").write_text("import autokern.auto\nimport autokern\nautokern.stats()\n")
    info = tmp_path / "eager-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eager\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[autokern.candidates]\nx = eager\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import autokern; autokern.enable(); print('enabled')"
    told = python("-c", program)
    assert told.stdout.split()[-1:] == ["enabled"], told.stderr
