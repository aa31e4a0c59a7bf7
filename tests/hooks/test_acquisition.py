"""Acquisitions on one thread: the same candidates, and torch's number of threads as it was."""

from __future__ import annotations

import pytest
import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
)
from botorch.acquisition.analytic import AnalyticAcquisitionFunction
from botorch.models import ModelListGP, SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.utils.transforms import t_batch_mode_transform

import autokern

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def model_of(n=12):
    x = torch.rand(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return SingleTaskGP(x, (3 * x).sin().sum(-1, keepdim=True)).eval()


class Watched(AnalyticAcquisitionFunction):
    """Remembers how many threads torch has where it is evaluated."""

    def __init__(self, model, error=None):
        super().__init__(model)
        self.seen, self.error = set(), error

    @t_batch_mode_transform(expected_q=1)
    def forward(self, X):
        self.seen.add(torch.get_num_threads())
        if self.error is not None:
            raise self.error
        return self.model.posterior(X).mean.squeeze(-1).squeeze(-1)


def optimised(acquisition, q=1, **kwargs):
    torch.manual_seed(0)
    given = {"num_restarts": 2, "raw_samples": 8, "options": {"maxiter": 5}, **kwargs}
    return optimize_acqf(acquisition, BOUNDS, q=q, **given)


def test_small_ones_run_on_one_thread():
    watched = Watched(model_of())
    optimised(watched)
    assert watched.seen == {2}
    watched.seen.clear()
    with autokern.enabled():
        optimised(watched)
    assert watched.seen == {1}


def test_large_ones_and_models_that_are_not_known_keep_all_threads():
    with autokern.enabled():
        large = Watched(model_of(2000))
        optimised(large, num_restarts=40, raw_samples=40)
        assert large.seen == {2}
        batches = Watched(model_of(2000))
        optimised(batches, num_restarts=40, raw_samples=40, options={"batch_limit": 1, "maxiter": 1})
        assert batches.seen == {1}
        unknown = Watched(model_of())
        unknown.model.train_inputs = None
        unknown.error = ValueError("mine")
        with pytest.raises(ValueError, match="mine"):
            optimised(unknown)
        assert unknown.seen == {2}


def test_the_number_is_restored_after_errors():
    broken = Watched(model_of(), KeyboardInterrupt())
    with autokern.enabled(), pytest.raises(KeyboardInterrupt):
        optimised(broken)
    assert broken.seen == {1}


def test_the_user_may_forbid_it(monkeypatch):
    monkeypatch.setenv("AUTOKERN_THREADS", "off")
    watched = Watched(model_of())
    with autokern.enabled():
        optimised(watched)
    assert watched.seen == {2}


@pytest.mark.parametrize(
    "make",
    [
        lambda: LogExpectedImprovement(model_of(), best_f=0.5),
        lambda: qLogExpectedImprovement(model_of(), best_f=0.5),
        lambda: qLogNoisyExpectedImprovement(model_of(), model_of().train_inputs[0]),
        lambda: qKnowledgeGradient(model_of(), num_fantasies=2),
        lambda: qLogExpectedImprovement(ModelListGP(model_of()), best_f=0.5),
    ],
)
def test_candidates_are_the_same(make):
    torch.manual_seed(1)
    found, value = optimised(make())
    with autokern.enabled():
        torch.manual_seed(1)
        ours, our_value = optimised(make())
    torch.testing.assert_close(ours, found, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_value, value, rtol=1e-6, atol=1e-8)
