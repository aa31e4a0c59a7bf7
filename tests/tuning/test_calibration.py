"""calibrate.py: parts before wholes, inside of which they are dispatched; what is left of an interrupted one."""

from __future__ import annotations

import pytest
import torch

from autokern.core.op import inside
from autokern.core.problem import Problem
from autokern.runtime import dispatch
from autokern.runtime.first_use import FirstUse
from autokern.tuning.calibration import calibrate
from autokern.tuning.profile import Profile

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def ops(make_op):
    """A part that doubles a matrix, and a whole whose stock calls the part by dispatch."""
    part = make_op("part")
    part.candidate("stock")(lambda a: 2 * a)
    part.candidate("other")(lambda a: a + a)
    seen = {"stock": [], "direct": [], "measuring": []}
    route = dispatch.route(part)

    def stock(a):
        seen["stock"].append(inside.active)
        seen["measuring"].append(inside.measuring)
        return route(a)

    def direct(a):
        seen["direct"].append(inside.active)
        return 2 * a

    whole = make_op("whole", composite=True, problem_of=lambda a: Problem(op="whole", m=a.shape[0], n=a.shape[1]))
    whole.candidate("stock")(stock)
    whole.candidate("direct")(direct)
    return part, whole, seen


def test_parts_are_measured_first_and_dispatched_inside_of_wholes(ops):
    part, whole, seen = ops
    published = []
    found = calibrate([whole, part], "quick", 2.0, ["cpu"], Profile(), dtypes=["float64"], publish=published.append)
    assert {t.problem.op for t in found.trials} == {"part", "whole"}
    assert {t.problem.op for t in published[0].trials} == {"part"}
    assert published[-1] == found
    assert not any(seen["stock"]), "what stock of a composite op calls is dispatched"
    assert all(seen["direct"]), "what any other candidate calls is not"
    assert all(seen["measuring"])
    assert not inside.active
    assert not inside.measuring
    entries = list(dispatch.session().memo["part"].values())
    assert {(entry.candidate.name, entry.trial) for entry in entries} == {("stock", True)}
    assert all(entry.count > 0 for entry in entries)
    assert dispatch.stats() == {}, "nobody but the calibration has called it"


def test_a_whole_alone_is_published_once(ops):
    _, whole, _ = ops
    published = []
    calibrate([whole], "quick", 1.0, ["cpu"], Profile(), dtypes=["float64"], publish=published.append)
    assert len(published) == 1


def test_first_use_does_not_calibrate_while_calibrating(ops, monkeypatch):
    _, whole, _ = ops
    monkeypatch.setenv("AUTOKERN_CALIBRATE", "first-use")
    dispatch.reset()
    monkeypatch.setattr(FirstUse, "_calibrate", lambda *_, **__: pytest.fail("a calibration inside of another"))
    calibrate([whole], "quick", 0.5, ["cpu"], Profile(), dtypes=["float64"])


def test_stock_of_a_composite_op_dispatches_its_parts_in_earnest(ops):
    _, whole, seen = ops
    call, a = dispatch.route(whole), torch.ones(3, 3, dtype=torch.float64)
    with dispatch.using(force={"whole": "stock", "part": "other"}):
        assert call(a).equal(2 * a)
        assert dispatch.stats()["part"] == {"other": 1}
    with dispatch.using(force={"whole": "direct"}):
        call(a)
    assert seen["stock"] == [False]
    assert seen["direct"] == [True]


def test_an_interrupted_calibration_publishes_what_it_has(ops, monkeypatch):
    part, whole, _ = ops
    published = []

    def interrupted(a):
        raise KeyboardInterrupt

    part.candidate("third")(lambda a: 2 * a)
    whole.candidate("stop")(interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate([part, whole], "quick", 2.0, ["cpu"], Profile(), dtypes=["float64"], publish=published.append)
    assert {t.problem.op for t in published[-1].trials} == {"part"}
    assert not inside.active
    assert not inside.measuring
