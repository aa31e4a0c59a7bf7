"""matrices.py: what a density needs of a matrix, and SciPy's package is never imported for this alone."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from scipy.linalg import _flapack as scipys

from autokern.density import matrices


@pytest.mark.slow
def test_scipy_is_not_imported_by_autokern_nor_by_a_step():
    program = """
import sys, torch, gpytorch, warnings
before = "scipy.linalg" in sys.modules
import autokern.auto, autokern
class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), gpytorch.kernels.RBFKernel()
    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
x = torch.rand(20, 2)
model = Model(x, x.sum(-1), gpytorch.likelihoods.GaussianLikelihood())
mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
mll(model(x), model.train_targets).backward()
print(before or not any(name.startswith("scipy") for name in sys.modules), sorted(autokern.stats()))
from autokern.density import matrices
from autokern.system import threads
alone = matrices._extension()
import scipy.linalg
import numpy as np
assert scipy.linalg._flapack.dpotrf is alone.dpotrf
assert np.allclose(scipy.linalg.cholesky(4 * np.eye(2)), 2 * np.eye(2))
from threadpoolctl import threadpool_info
several = [one for one in threadpool_info() if one["internal_api"] == "openblas"]
assert len(threads._libraries()) == sum(one["threading_layer"] == "pthreads" for one in several)
"""
    told = subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, capture_output=True, text=True)
    assert told.stdout.splitlines()[-1].startswith("True"), told.stdout


def test_a_scipy_of_another_layout_is_imported(monkeypatch):
    assert matrices._extension.__wrapped__() is scipys
    monkeypatch.delitem(sys.modules, "scipy.linalg._flapack")
    found = (lambda name: None), (lambda name: importlib.machinery.ModuleSpec(name, None, is_package=True))
    for spec in found:
        with monkeypatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", spec)
            assert hasattr(matrices._extension.__wrapped__(), "dpotri")
    alone = matrices._extension.__wrapped__()
    k = np.cov(np.random.default_rng(9).normal(size=(9, 50)))
    np.testing.assert_array_equal(alone.dpotrf(k)[0], scipys.dpotrf(k)[0])
