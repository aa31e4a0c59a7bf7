"""Tensors that stay: none by importing all of autokern, and none when the first models are gone."""

from __future__ import annotations

from support.programs import said

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
