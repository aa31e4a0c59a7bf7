"""Ops nest: each is larger than those it asks, and is timed while the choices inside of it are in force."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from support.clocks import Clock

from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.core.registry import registered
from autokern.core.state import inside
from autokern.hooks import install
from autokern.runtime import dispatch
from autokern.runtime.session import Session
from autokern.tuning import timer
from autokern.tuning.calibration import calibrate
from autokern.tuning.measuring import trial
from autokern.tuning.profile import Profile

pytestmark = pytest.mark.usefixtures("one_thread")

WITH_PARTS = [(op, c) for op in registered() for c in op.listed if c.parts or (op.composite and c is op.stock)]


def samples(op: Op, candidate: Candidate) -> Iterator[Problem]:
    """The smallest problem of each kind that a candidate serves: three, and one where stock approximates."""
    kinds: dict[tuple[object, ...], Problem] = {}
    for problem in sorted(op.grid("full", "float64", "cpu"), key=lambda p: p.batch * p.m * p.n):
        if candidate.why_not(problem) is None:
            loose = op.approximates(problem)
            kinds.setdefault((loose, *(() if loose else (problem.words[0], problem.grad))), problem)
    exact = [problem for kind, problem in kinds.items() if not kind[0]]
    yield from [*exact[:3], *(problem for kind, problem in kinds.items() if kind[0])]


@pytest.fixture
def asked(monkeypatch):
    """Ops and problems that a session was asked about."""
    found, entry = [], Session.entry

    def noted(self, op, args, settings):
        made = entry(self, op, args, settings)
        found.append((op, made.decision.problem))
        return made

    monkeypatch.setattr(Session, "entry", noted)
    return found


@pytest.mark.parametrize(("op", "candidate"), WITH_PARTS, ids=[f"{op.name}-{c.name}" for op, c in WITH_PARTS])
def test_an_op_is_measured_after_those_that_its_candidates_ask(op, candidate, asked):
    seen = set()
    for problem in samples(op, candidate):
        dispatch.session().forget()
        asked.clear()
        args = op.sample(problem, torch.Generator().manual_seed(1))
        with install.enabled(), warnings.catch_warnings(), inside.having(active=True, measuring=True):
            warnings.simplefilter("ignore")
            trial(op, candidate.run, problem, args)()
        for part, asking in asked:
            if part is op:  # a closure asks for the value alone, as another problem
                assert (op.name, problem.grad, asking.grad) == ("objective", "", "theta"), problem
            else:
                assert part.nesting < op.nesting, (problem, part.name)
        seen.update(part.name for part, _ in asked)
    assert op.name != "fantasy" or seen >= {"cholesky", "kernel_matrix"}, "otherwise nothing is tested"


def test_ops_without_parts_are_innermost_and_all_levels_are_there():
    others = [op for op in registered() if op.nesting == 0]
    assert not any(op.composite or any(c.parts for c in op.listed) for op in others)
    assert {op.nesting for op in registered()} == set(range(5))


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(timer, "compare", found.compare)
    return found


@pytest.fixture
def nested(make_op, clock):
    """Three ops, of which each one's stock calls the one before; directly they take 5 and 8 seconds.

    Parts take 10 seconds by stock and 1 by the other candidate: then wholes are faster by parts, at 2 and 4 seconds.
    """

    def make(*nesting: int) -> list[Op]:
        part = make_op("part", nesting=nesting[0])
        part.candidate("stock")(clock.takes(lambda: 10.0))
        part.candidate("quick")(clock.takes(lambda: 1.0))
        ops = [part]
        for name, level, seconds in (("middle", nesting[1], 5.0), ("whole", nesting[2], 8.0)):
            op = make_op(name, nesting=level, composite=True)
            op.candidate("stock")(clock.takes(lambda: 0.0, dispatch.route(ops[-1]), times=2))
            op.candidate("direct")(clock.takes(lambda seconds=seconds: seconds))
            ops.append(op)
        return ops

    return make


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("nesting", "seconds", "choice"),
    [((0, 1, 2), 4.0, "stock"), ((1, 5, 7), 4.0, "stock"), ((5, 5, 5), 8.0, "direct")],
)
def test_wholes_are_timed_with_the_choices_of_their_parts(nested, clock, nesting, seconds, choice, order):
    """The last case is what would come out without an order: direct, since parts still took ten seconds each."""
    ops = nested(*nesting)
    adopt = dispatch.session().adopt
    adopt(calibrate(ops[::order], "quick", 10.0, ["cpu"], Profile(), dtypes=["float64"], publish=adopt))
    whole, call = ops[-1], dispatch.route(ops[-1])
    assert clock.of(lambda: call(torch.ones(4, 4, dtype=torch.float64))) == seconds
    assert dispatch.explain(Problem(op=whole.name, m=4, n=4)).candidate == choice
