"""Evaluations that draw random numbers: replays draw what stock draws, in its order, or do not serve."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from botorch import acquisition as acquisitions
from botorch.acquisition.multi_objective.hypervolume_knowledge_gradient import qHypervolumeKnowledgeGradient
from botorch.models import ModelListGP, SingleTaskGP
from botorch.sampling.normal import IIDNormalSampler, SobolQMCNormalSampler
from botorch.sampling.stochastic_samplers import StochasticSampler
from support.acquisitions import DOUBLE, improvement, noisy, points, single, wrapper
from support.outcomes import count

import autokern
from autokern.hooks import install
from autokern.hooks import later as hooks
from autokern.hooks.later import repeated

pytestmark = pytest.mark.filterwarnings("ignore:.*has known numerical issues", "ignore:A not p.d., added jitter")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Record the third evaluation, and serve whatever it takes."""
    hooks.look()
    for name, value in {"_SPENT": 0.0, "_GAIN": np.inf, "_histories": {}}.items():
        monkeypatch.setattr(repeated, name, value)
    with install.enabled():
        yield


def hypervolume():
    """Two objectives; each evaluation makes a sampler, which draws a seed that nobody uses."""
    models = [noisy(SingleTaskGP(points(), (k * points()).cos().sum(-1, keepdim=True))) for k in (2, 3)]
    return qHypervolumeKnowledgeGradient(
        ModelListGP(*models), torch.tensor([-3.0, -3.0], dtype=DOUBLE), num_fantasies=2, num_pareto=2
    )


class Drawing(acquisitions.PosteriorMean):
    """Draws at each evaluation, and adds what is drawn."""

    __module__ = acquisitions.PosteriorMean.__module__

    def forward(self, X):
        return super().forward(X) + self.drawn(self.given)


def drawing(name):
    made = Drawing(single())
    made.drawn, made.given = DRAWN[name], single().posterior(torch.zeros(1, 2, dtype=DOUBLE))
    return made


GENERATOR = torch.Generator()
DRAWN = {
    "numbers": lambda given: torch.rand(1, dtype=DOUBLE) + torch.randn(1, dtype=DOUBLE),
    "in place": lambda given: torch.empty(1, dtype=DOUBLE).uniform_(),
    "nothing of use": lambda given: 0.0 * torch.rand(3, dtype=DOUBLE).sum(),
    "a number that Python reads": lambda given: torch.rand(1).item(),
    "of another generator": lambda given: torch.rand(1, generator=GENERATOR).clone(),
    "a sampler's seed": lambda given: IIDNormalSampler(torch.Size([2]))(given).mean(),
    "a sampler's seed for nothing": lambda given: 0.0 * IIDNormalSampler(torch.Size([2]))(given).mean(),
    "a sampler's seed for Sobol points": lambda given: SobolQMCNormalSampler(torch.Size([2]))(given).mean(),
}  # fmt: skip
SERVED = ("numbers", "in place", "nothing of use")
CASES = {
    "stochastic sampler": (lambda: improvement(sampler=StochasticSampler(torch.Size([4]))), 2, 4),
    "hypervolume knowledge gradient": (hypervolume, 5, 4),
    **{name: (lambda name=name: drawing(name), 1, 4 if name in SERVED else 0) for name in DRAWN},
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_the_random_state_are_stock_s(name):
    make, q, replays = CASES[name]
    torch.manual_seed(0)
    acquisition = make()
    asked = [(points(4, q * 2, seed=seed).numpy(), [0, 1, 2, 3]) for seed in range(9)]
    asked += [(points(left, q * 2, seed=left).numpy(), list(range(left))) for left in (3, 2)]
    before, found = count("optimised function", "replay"), []
    for stock in (False, True):
        torch.manual_seed(1)
        GENERATOR.manual_seed(1)
        with autokern.using(force={"posterior": "stock"}) if stock else torch.enable_grad():
            call = wrapper(acquisition, q, 2)
            found.append([[values, slopes, torch.get_rng_state()] for values, slopes in (call(*one) for one in asked)])
        if not stock:
            assert count("optimised function", "replay") - before == replays
    for (value, slopes, state), (its_value, its_slopes, its_state) in zip(*found, strict=True):
        assert torch.equal(state, its_state)
        np.testing.assert_allclose(value, its_value, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(slopes, its_slopes, rtol=1e-6, atol=1e-8)
