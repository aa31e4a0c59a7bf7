"""later/acquisition.py: BoTorch's batched optimiser with a SciPy that BoTorch takes for too new."""

import json

import pytest
import scipy
import torch
from support.outcomes import outcome
from support.programs import QUIET, python

import autokern
from autokern.cli import doctor

gen = pytest.importorskip("botorch.generation.gen")

from autokern.hooks import later  # noqa: E402
from autokern.hooks.later import acquisition  # noqa: E402

PROGRAM = """
import json
import scipy
if int(scipy.__version__.split(".")[1]) < 18:
    scipy.__version__ = "1.18.0"  # takes the same arguments
import autokern, torch
from botorch.generation.gen import gen_candidates_scipy

starts = torch.rand(6, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

def best(**options):
    calls = []
    def acquisition(x):
        calls.append(1)
        x = x.flatten(-2)  # Rosenbrock's function
        return -(100 * (x[..., 1:] - x[..., :-1] ** 2) ** 2 + (1 - x[..., :-1]) ** 2).sum(-1)
    _, values = gen_candidates_scipy(starts, acquisition, 0.0, 2.0, **options)
    return len(calls), values.tolist()

found = {"before": best()}
with autokern.enabled():
    found["enabled"] = best()
    found["one problem"] = best(use_parallel_mode=False)
    found["other method"] = best(options={"method": "SLSQP"})
found["after"] = best()
found["stock's other method"] = best(options={"method": "SLSQP"})
print(json.dumps(found))
"""


def test_starts_are_a_batch_while_autokern_is_enabled_and_not_after():
    found = json.loads(python(*QUIET, "-c", PROGRAM, check=True).stdout.splitlines()[-1])
    assert found["before"] == found["after"] == found["one problem"]
    assert found["other method"] == found["stock's other method"]
    assert 1.5 * found["enabled"][0] < found["before"][0]
    assert found["enabled"][1] == pytest.approx(found["before"][1], abs=1e-4)


@pytest.mark.parametrize("replaces", [True, False], ids=["replaced", "inserted"])
@pytest.mark.parametrize("features", [{}, {1: 2.0}, {7: 1.0}, {0: torch.ones(2)}], ids=str)
def test_fixed_features_are_those_of_stock(features, replaces):
    def run():
        x = torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(0)).mT.requires_grad_()
        fixed = gen.fix_features(x, features, replaces)
        fixed.mul_(2.0)  # an acquisition may write
        (slope,) = torch.autograd.grad((fixed**2).sum(), x)
        return fixed.tolist(), slope.tolist(), fixed.stride(), fixed.requires_grad, x.tolist()

    later.look()
    stock, function = outcome(run), gen.fix_features
    with autokern.enabled():
        assert gen.fix_features is not function
        assert outcome(run) == stock


RELEASES = [
    *((version, False, "not tried") for version in ("1.17.1", "1.19.0", "2.0.0")),
    ("1.18.3", False, ""), ("1.18.0", True, "64-bit"),
]  # fmt: skip


@pytest.mark.parametrize(("version", "large", "obstacle"), RELEASES)
def test_starts_are_a_batch_by_the_release_that_was_tried_and_doctor_names_it(monkeypatch, version, large, obstacle):
    monkeypatch.setattr(scipy, "__version__", version)
    monkeypatch.setattr("scipy.optimize._lbfgsb_py.HAS_ILP64", large, raising=False)
    told = acquisition.obstacle() or ""
    assert obstacle in told
    assert bool(told) == bool(obstacle)
    leaves, release = acquisition.leaves_batch(gen), version.rpartition(".")[0]
    assert leaves is (version != "1.17.1")
    for found in doctor._optimiser():
        assert f"batched L-BFGS-B with SciPy {release}; {told or 'autokern puts it back'}" in found.found
        assert (found.status, "scipy<1.18" in found.advice) == (("note", True) if obstacle else ("ok", False))
    assert len(doctor._optimiser()) == leaves
