"""prefitted.py: the fits that the package ships predict what the cost model does from the trials beside them."""

from __future__ import annotations

import numpy as np
import pytest
from autokern.tuning.cost_model import CostModel
from autokern.tuning.prefitted import Prefitted
from autokern.tuning.residuals import places_of

from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.tuning import recorded
from autokern.tuning.drawing import random_problems
from autokern.tuning.profile import Profile

HOSTS = recorded.hosts()


def of_trials(host: recorded.RecordedHost, op: str) -> CostModel:
    return CostModel(Profile(trials=host.trials(op, "cpu")))


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.fields["cpu"]["model"])
@pytest.mark.parametrize("name", ["kernel_matrix", "matmul", "qr", "exact_log_prob"])
def test_means_are_those_of_the_trials_and_deviations_hardly_larger(name, host):
    op, told, fitted = get(name), Prefitted(host), of_trials(host, name)
    problems = random_problems(40, 3, ops=[name], device="cpu", flops=1e12)
    problems += [t.problem for t in host.trials(name, "cpu")[:10]]
    places = places_of(op, problems)
    for candidate in op.candidates:
        ours, theirs = (model.told(op, candidate, problems, places) for model in (told, fitted))
        assert (ours is None) == (theirs is None)
        if ours is None:
            continue
        assert ours.mean == pytest.approx(theirs.mean, abs=1e-4)
        assert ours.distance == pytest.approx(theirs.distance)
        mine, exact = np.sqrt(ours.variance), np.sqrt(theirs.variance)
        assert (mine >= exact - 1e-4).all()
        assert (mine <= 1.5 * exact).all()
        assert np.median(mine / exact) < 1.05
        one = told.told(op, candidate, problems[3:4], places[3:4])
        assert (one.mean, one.variance) == (pytest.approx(ours.mean[3:4]), pytest.approx(ours.variance[3:4]))
        assert told.told(op, candidate, problems[3:4], places[3:4]) is one
        assert told.wins(name, "cpu", candidate.name) == fitted.wins(name, "cpu", candidate.name)


def test_what_was_not_recorded_is_not_told():
    told, op, problem = Prefitted(HOSTS[0]), get("qr"), Problem(op="qr", m=50, n=5, device="mps")
    assert told.told(op, op.stock, [problem], places_of(op, [problem])) is None
    assert told.wins("qr", "mps", "stock") == []


def test_few_trials_and_one_are_enough(make_op):
    op = make_op("toy")
    op.candidate("stock")(lambda a: 2 * a)
    op.candidate("fast")(lambda a: a + a)
    problems = [Problem(op="toy", m=n, n=n) for n in (8, 64)]
    for count in (1, 2):
        trials = [
            recorded.Trial(p, {"stock": recorded.Timing(1e-5 * p.n), "fast": recorded.Timing(5e-6 * p.n, 0.5)})
            for p in problems[:count]
        ]
        (host,) = recorded.read(recorded.pack([Profile(trials=trials)]))
        places = places_of(op, problems)
        ours, theirs = (m.told(op, op["fast"], problems, places) for m in (Prefitted(host), of_trials(host, "toy")))
        assert ours.mean == pytest.approx(theirs.mean, abs=1e-5)
        assert ours.variance == pytest.approx(theirs.variance, abs=1e-5)
