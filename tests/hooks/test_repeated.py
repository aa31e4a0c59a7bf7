"""Evaluations that an optimiser repeats: replays compute what stock does, and skip nothing that a program notices."""

import contextlib
import warnings

import msgspec
import numpy as np
import pytest
import torch
from botorch import acquisition as acquisitions
from botorch.acquisition import active_learning
from botorch.acquisition import objective as objectives
from botorch.acquisition.multi_objective import logei as multi_objective
from botorch.acquisition.risk_measures import VaR
from botorch.models import MultiTaskGP, SingleTaskMultiFidelityGP
from botorch.models.transforms import Standardize
from botorch.models.transforms.input import InputPerturbation
from support.acquisitions import (
    DOUBLE,
    SAMPLER,
    asked,
    by_stock,
    improvement,
    kronecker,
    noisy,
    points,
    several,
    single,
    wrapper,
)
from support.losses import replays

from autokern.hooks.later import repeated
from autokern.runtime import dispatch

pytestmark = [
    pytest.mark.usefixtures("third_recorded"),
    pytest.mark.filterwarnings("ignore:.*has known numerical issues"),
    pytest.mark.filterwarnings("ignore:The model inputs are of type torch.float32"),
    pytest.mark.filterwarnings("ignore:A not p.d., added jitter"),
]


def tasks():
    x = torch.cat([points(12), torch.arange(12, dtype=DOUBLE).remainder(2).unsqueeze(-1)], -1)
    return noisy(MultiTaskGP(x, x.sum(-1, keepdim=True).sin(), task_feature=-1, output_tasks=[0]))


def of_samples(function):
    return objectives.GenericMCObjective(lambda samples, X=None: function(samples))


def constrained():
    composite = objectives.ConstrainedMCObjective(lambda z, X=None: z[..., 0], [lambda z: z[..., 1] - 0.4])
    return acquisitions.qExpectedImprovement(several(), 0.1, SAMPLER(), composite)


def pareto():
    reference, front = torch.tensor([-1.0, -1.0], dtype=DOUBLE), torch.rand(3, 2, dtype=DOUBLE)
    from botorch.utils.multi_objective.box_decompositions import FastNondominatedPartitioning

    return multi_objective.qLogExpectedHypervolumeImprovement(
        several(), reference, FastNondominatedPartitioning(reference, front), SAMPLER()
    )


def perturbed():
    model = single(input_transform=InputPerturbation(0.05 * points(4, seed=3)), outcome_transform=Standardize(1))
    return acquisitions.qNoisyExpectedImprovement(model, points(), SAMPLER(), VaR(0.5, 4))


def fidelities():
    x = torch.cat([points(), points(10, 1, seed=4)], -1)
    return acquisitions.PosteriorMean(SingleTaskMultiFidelityGP(x, x.sum(-1, keepdim=True).sin(), data_fidelities=[2]))


class Staged(acquisitions.LogExpectedImprovement):
    """The last sets that an optimiser leaves have another weight."""

    def forward(self, X):
        return super().forward(X) * (1.0 if X.shape[0] > 2 else 3.0)


CASES = {
    "own number of sets": (lambda: Staged(single(), 0.3), 1),
    "log_ei": (lambda: acquisitions.LogExpectedImprovement(single(), 0.3), 1),
    "ucb": (lambda: acquisitions.UpperConfidenceBound(single(), 2.0), 1),
    "single precision": (lambda: acquisitions.LogExpectedImprovement(single(torch.float32), 0.3), 1),
    "q_log_ei": (improvement, 2),
    "q_log_nei": (lambda: acquisitions.qLogNoisyExpectedImprovement(single(), points(), SAMPLER()), 2),
    "q_ucb": (lambda: acquisitions.qUpperConfidenceBound(single(), 2.0, SAMPLER()), 3),
    "own objective": (
        lambda: improvement(kronecker(), -0.1, objective=of_samples(lambda z: -(z - 0.5).square().sum(-1))), 2,
    ),
    "pending": (lambda: improvement(X_pending=2 + points(2, seed=5)), 2),
    "knowledge gradient": (lambda: acquisitions.qKnowledgeGradient(single(), 3), 4),
    "entropy": (lambda: acquisitions.qLowerBoundMaxValueEntropy(single(), points(40, seed=2)), 1),
    "constraints": (constrained, 2), "perturbed": (perturbed, 1),
    "fidelities": (fidelities, 1), "hypervolume": (pareto, 2),
    "tasks": (lambda: acquisitions.LogExpectedImprovement(tasks(), 0.3), 1),
}  # fmt: skip


def agree(ours, theirs, rtol=1e-8):
    for one, other in zip(ours, theirs, strict=True):
        size = np.abs(np.asarray(other)).max(initial=1e-30)
        np.testing.assert_allclose(one, other, rtol=0, atol=rtol * size)


class Warning(acquisitions.PosteriorMean):
    __module__ = acquisitions.PosteriorMean.__module__

    def forward(self, X):
        warnings.warn("near the border", UserWarning, stacklevel=1)
        return super().forward(X)


class Penalised(acquisitions.LogExpectedImprovement):
    """A user's penalty of points beyond a limit, by a tensor made of numbers that no mode sees."""

    def forward(self, X):
        beyond = torch.tensor([x.sum() > 5.0 for x in X], dtype=X.dtype)
        return super().forward(X) - beyond * X.sum((-1, -2))


REFUSED = {
    "a list of tensors": (lambda: Penalised(single(), 0.3), 1),
    "warning": (lambda: Warning(single()), 1),
    "few": (lambda: acquisitions.PosteriorMean(single()), 1),
    "a setting": (lambda: acquisitions.PosteriorMean(single()), 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_recorded_is_left_to_the_library(name, monkeypatch):
    if name == "few":
        monkeypatch.setattr(repeated, "_SPENT", 60.0)
    if name == "a setting":
        off = msgspec.structs.replace(dispatch.session().settings, replay=False)
        monkeypatch.setattr(dispatch.session(), "settings", off)
    make, q = REFUSED[name]
    call, before = wrapper(make(), q, 2), replays()
    for seed in range(8):
        with pytest.warns(UserWarning, match="near the border") if name == "warning" else contextlib.nullcontext():
            asked(call, [seed], q)
    assert replays() == before


@pytest.mark.parametrize("name", [pytest.param(of, marks=[pytest.mark.slow] * (of == "hypervolume")) for of in CASES])
def test_replays_are_what_stock_computes(name):
    make, q = CASES[name]
    torch.manual_seed(0)
    acquisition = make()
    dtype = next(acquisition.parameters()).dtype
    d = 3 if name == "fidelities" else 2
    call, before, rows = wrapper(acquisition, q, d, dtype), replays(), list(range(4))
    asked = [(points(left, q * d, seed=seed).numpy(), rows[:left]) for seed, left in enumerate([4] * 9 + [3, 2, 1], 20)]
    ours = [call(*one) for one in asked]
    served = replays() - before
    with by_stock():
        stock = wrapper(acquisition, q, d, dtype)
        for found, one in zip(ours, asked, strict=True):  # an optimiser drops sets that have converged
            agree(found, stock(*one), 1e-3 if dtype is torch.float32 else 1e-8)
    # the first call with fewer sets is compared; with functions of the user's, each other number of sets
    assert served == (4 if name in ("own number of sets", "own objective", "constraints") else 6)


class NaN(acquisitions.LogExpectedImprovement):
    """Has slopes but no value, and may fail under a mode of torch, as some of its operators do."""

    def __init__(self, fails):
        super().__init__(single(), 0.3)
        self.fails = fails

    def forward(self, X):
        if self.fails:
            torch._C._len_torch_dispatch_stack() and torch.empty(0).max()
        return super().forward(X) + torch.nan


@pytest.mark.parametrize("fails", [False, True])
def test_no_value_is_like_another_and_an_error_of_a_recording_leaves_the_evaluation_to_the_library(fails):
    call, before = wrapper(NaN(fails), 1, 2), replays()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [call(points(4, 2, seed=seed).numpy(), [0, 1, 2, 3])[0] for seed in range(8)]
    assert np.isnan(found).all()
    assert (replays() == before) is fails


def test_gradients_that_the_library_loses_are_not_replayed():
    grid = points(20, seed=7)
    call, before = wrapper(active_learning.qNegIntegratedPosteriorVariance(single(), grid), 2, 2), replays()
    every = [points(4, 4, seed=3).numpy()] * 8
    losses, slopes = zip(*(call(x, [0, 1, 2, 3]) for x in every), strict=True)
    assert replays() == before
    agree(losses[1:], losses[:1] * 7)
    agree(slopes[1:], slopes[:1] * 7)


class Branching(acquisitions.PosteriorMean):
    """It reads a number, and takes another branch by it."""

    def forward(self, X):
        found = super().forward(X)
        return found if X.sum() < 100 else 2 * found


@pytest.fixture
def recorded(monkeypatch):
    """The sets of each call that is recorded, where a recording costs nothing."""
    sizes, record, judge = [], repeated.Repeated._recorded, repeated.Repeated._judge
    monkeypatch.setattr(repeated.Repeated, "_judge", lambda self: (judge(self), setattr(self, "price", 0.0)))
    monkeypatch.setattr(
        repeated.Repeated, "_recorded", lambda self, *of: sizes.append(len(of[-1])) or record(self, *of)
    )
    return sizes


def test_replays_go_on_after_another_branch_and_one_that_stays_is_recorded(recorded):
    x = points(4, 2).numpy()
    every = [(values, [0, 1, 2, 3]) for values in [x] * 8 + [x + 100] + [x] * 10 + [x + 100] * 12]
    before, (ours, theirs) = replays(), by_both(lambda: Branching(single()), every)
    assert recorded == [4, 4]
    assert replays() - before == 3 + 10 + 6
    agree(ours, theirs)


def test_few_sets_that_are_left_are_recorded_again(recorded):
    counts = [4] * 8 + [3] * 6 + [2] * 12 + [1] * 12
    every = [(points(n, 2, seed=at).numpy(), list(range(n))) for at, n in enumerate(counts, 20)]
    ours, theirs = by_both(lambda: acquisitions.qUpperConfidenceBound(single(), 2.0, SAMPLER()), every)
    assert recorded == [4, 2, 1]
    agree(ours, theirs)


def by_both(make, calls):
    """The numbers of each call with replays, and by the library."""
    call = wrapper(make(), 1, 2)
    ours = [call(*one) for one in calls]
    with by_stock():
        call = wrapper(make(), 1, 2)
        return [[number for found in each for number in found] for each in (ours, [call(*one) for one in calls])]


def test_long_optimisations_let_the_next_be_recorded_at_once_and_short_ones_do_not(monkeypatch):
    monkeypatch.setattr(repeated, "_SPENT", 0.06)
    history = repeated._History()
    assert history.spent() == 0.06
    history.repaid, history.seconds, history.count = 25.0, 0.004, 31
    assert history.spent() == 0.0
    other = repeated._History()
    other.repaid, other.seconds, other.count = 25.0, 0.004, 30  # of which 25 would be replays
    assert other.spent() == 0.1
    other.refused = 3
    assert other.spent() == pytest.approx(0.06 * 4**3)
    other.refused = 10_000
    assert 3600 < other.spent() < np.inf


@pytest.mark.parametrize("wrong", [0, -1], ids=["values", "slopes"])
@pytest.mark.parametrize(("first", "least", "most"), [(0, 0, 0), (10, 8, 40)], ids=["at once", "later"])
def test_a_replay_that_differs_from_the_library_is_dropped(monkeypatch, wrong, first, least, most):
    """By a fault of its own: two replays are compared before one serves, and one of 32 calls from then on."""
    run, runs = repeated.Repeated._run, []

    def faulty(self):
        took = run(self)
        runs.append(took)
        if len(runs) > first:
            self._results[wrong].mul_(1.001)
        return took

    monkeypatch.setattr(repeated.Repeated, "_run", faulty)
    before, call = replays(), wrapper(improvement(), 2)
    found = asked(call, range(80), 2)
    with by_stock():
        expected = asked(wrapper(improvement(), 2), range(80), 2)
    for ours, theirs in [*zip(found, expected, strict=True)][: 3 if first == 0 else 10]:
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)
    assert least <= replays() - before <= most
