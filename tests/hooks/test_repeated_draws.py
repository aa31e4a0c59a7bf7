"""Evaluations that draw random numbers: replays draw what stock draws, in its order, or do not serve."""

import numpy as np
import pytest
import torch
from botorch import acquisition as acquisitions
from botorch.acquisition.multi_objective.hypervolume_knowledge_gradient import qHypervolumeKnowledgeGradient
from botorch.exceptions.errors import OptimizationGradientError
from botorch.sampling.normal import IIDNormalSampler, SobolQMCNormalSampler
from botorch.sampling.stochastic_samplers import StochasticSampler
from support.acquisitions import DOUBLE, improvement, points, several, single, wrapper
from support.outcomes import count

import autokern

pytestmark = [
    pytest.mark.usefixtures("third_recorded"),
    pytest.mark.filterwarnings("ignore:.*has known numerical issues", "ignore:A not p.d., added jitter"),
]


def hypervolume():
    """Two objectives; each evaluation makes a sampler, which draws a seed that nobody uses."""
    reference = torch.tensor([-3.0, -3.0], dtype=DOUBLE)
    return qHypervolumeKnowledgeGradient(several(), reference, num_fantasies=2, num_pareto=2)


class Drawing(acquisitions.PosteriorMean):
    """Draws at each evaluation, and adds what is drawn."""

    __module__ = acquisitions.PosteriorMean.__module__

    def forward(self, X):
        mean = super().forward(X)
        return mean + self.drawn(self.given, mean)


def drawing(name):
    made = Drawing(single())
    made.drawn, made.given = DRAWN[name], single().posterior(torch.zeros(1, 2, dtype=DOUBLE))
    return made


GENERATOR, ANOTHER = torch.Generator(), torch.Generator()
ENGINE = torch.quasirandom.SobolEngine(1, scramble=True, seed=1)
STATISTICS = torch.zeros(2), torch.ones(2)
DRAWN = {
    "numbers": lambda given, mean: torch.rand(1, dtype=DOUBLE) + torch.randn(1, dtype=DOUBLE),
    "in place": lambda given, mean: torch.empty(1, dtype=DOUBLE).uniform_(),
    "nothing of use": lambda given, mean: 0.0 * torch.rand(3, dtype=DOUBLE).sum(),
    "a number that Python reads": lambda given, mean: torch.rand(1).item(),
    "of another generator": lambda given, mean: torch.rand(1, generator=GENERATOR).clone(),
    "of another generator, without a slope": lambda given, mean: (
        (mean - mean.detach()).sqrt() * torch.rand(1, generator=GENERATOR)
    ),
    "of two generators, without a slope": lambda given, mean: (
        (mean - mean.detach()).sqrt() * torch.rand(1, generator=GENERATOR) * torch.rand(1, generator=ANOTHER)
    ),
    "of a generator after what cannot be recorded, without a slope": lambda given, mean: (
        (mean - mean.detach()).sqrt().to_sparse().to_dense() * torch.rand(1, generator=ANOTHER)
    ),
    "points of an engine": lambda given, mean: ENGINE.draw(2).sum(),
    "points of an engine for nothing": lambda given, mean: 0.0 * ENGINE.draw(2).sum(),
    "running statistics": lambda given, mean: torch.nn.functional.batch_norm(
        torch.arange(6.0).reshape(3, 2), *STATISTICS, training=True
    ).sum(),
    "a sampler's seed": lambda given, mean: IIDNormalSampler(torch.Size([2]))(given).mean(),
    "a sampler's seed for nothing": lambda given, mean: 0.0 * IIDNormalSampler(torch.Size([2]))(given).mean(),
    "a sampler's seed for Sobol points": lambda given, mean: SobolQMCNormalSampler(torch.Size([2]))(given).mean(),
}  # fmt: skip
SERVED = ("numbers", "in place", "nothing of use")
CASES = {
    "stochastic sampler": (lambda: improvement(sampler=StochasticSampler(torch.Size([4]))), 2, 4),
    "hypervolume knowledge gradient": (hypervolume, 5, 4),
    **{name: (lambda name=name: drawing(name), 1, 4 if name in SERVED else 0) for name in DRAWN},
}


def ended(call, one):
    try:
        return call(*one)
    except OptimizationGradientError:
        return np.nan, np.nan


@pytest.mark.parametrize("name", CASES)
def test_values_and_the_random_state_are_stock_s(name):
    make, q, replays = CASES[name]
    torch.manual_seed(0)
    acquisition = make()
    asked = [(points(4, q * 2, seed=seed).numpy(), [0, 1, 2, 3]) for seed in range(9)]
    asked += [(points(sets, q * 2, seed=sets).numpy(), list(range(sets))) for sets in (3, 2)]
    before, found, left = count("optimised function", "replay"), [], []
    for stock in (False, True):
        torch.manual_seed(1)
        GENERATOR.manual_seed(1)
        ANOTHER.manual_seed(1)
        ENGINE.reset()
        for tensor in STATISTICS:
            tensor.fill_(1.0)
        with autokern.using(force={"posterior": "stock"}) if stock else torch.enable_grad():
            call = wrapper(acquisition, q, 2)
            found.append([[*ended(call, one), torch.get_rng_state()] for one in asked])
            states = GENERATOR.get_state(), ANOTHER.get_state(), torch.tensor(ENGINE.num_generated)
            left.append([*states, *(t.clone() for t in STATISTICS)])
        if not stock:
            assert count("optimised function", "replay") - before == replays
    for ours, theirs in zip(*left, strict=True):
        assert torch.equal(ours, theirs)
    for (value, slopes, state), (its_value, its_slopes, its_state) in zip(*found, strict=True):
        assert torch.equal(state, its_state)
        np.testing.assert_allclose(value, its_value, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(slopes, its_slopes, rtol=1e-6, atol=1e-8)


def test_a_bit_generator_of_numpy_s_own_is_kept_without_a_warning():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        call = wrapper(drawing("numbers"), 1, 2)
        for seed in range(6):
            call(points(4, 2, seed=seed).numpy(), [0, 1, 2, 3])
        assert np.random.random() == np.random.Generator(np.random.PCG64(1)).random()
    finally:
        np.random.set_bit_generator(before)
