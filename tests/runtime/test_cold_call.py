"""A cold call asks each candidate each question once, and once more of the coarse neighbour that decides for it."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from support.bases import Replayed

from autokern.core.problem import Problem
from autokern.core.registry import get, registered
from autokern.core.settings import Settings
from autokern.runtime import dispatch
from autokern.system import memory
from autokern.tuning.store import read_file

pytestmark = pytest.mark.usefixtures("one_thread")
HOST = next(iter(sorted((Path(__file__).parents[2] / "calibration" / "hosts").glob("*.json"))))
QUESTIONS = ("unsupported", "unavailable", "memory")


@pytest.fixture
def asked(monkeypatch):
    """How often each candidate of each op was asked each question, by what it was asked; not by other candidates."""
    counts: Counter[tuple[object, ...]] = Counter()
    within = []

    def counted(op, candidate, question):
        honest = getattr(candidate, question)

        def answer(of):
            counts[op.name, candidate.name, question, of] += not within
            within.append(question)
            try:
                return honest(of)
            finally:
                within.pop()

        return answer

    for op in registered():
        watched = [replace(c, **{q: counted(op, c, q) for q in QUESTIONS}) for c in op.candidates]
        monkeypatch.setattr(op, "listed", watched)
    return counts


def sampled(op):
    """Arguments of the smallest problem that has a coarse neighbour, or of the smallest of all."""
    problem = min(op.grid("quick", "float64", "cpu"), key=lambda p: (p == p.coarse, p.batch * p.m * p.n))
    return op.sample(problem, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("accuracy", ["same", "approximate"])
@pytest.mark.parametrize("name", [op.name for op in registered()])
def test_each_question_is_asked_once(asked, monkeypatch, name, accuracy, large):
    op = get(name)
    args = sampled(op)
    here = dispatch.reset(Settings(calibrate="never", accuracy=accuracy))
    here.adopt(read_file(HOST))
    if large:
        monkeypatch.setattr(memory, "LARGE", 1)
    problem = op.problem_of(*args)
    asked.clear()
    entry = here.entry(op, args, here.settings)
    assert entry.decision.problem == problem
    found = {key: count for key, count in asked.items() if key[0] == name}
    of = {key[3] for key in found if key[2] != "unavailable"}
    assert of == {problem} if large else of <= {problem, problem.coarse}
    for (_, candidate, question, _), count in found.items():
        most = len(of) if question == "unavailable" else 1  # it is asked about a kind of device, not about a problem
        assert count <= most, (candidate, question)


def test_a_recorded_host_is_not_asked_about_this_machine(asked):
    table = Replayed(get("qr"), Problem(op="qr", m=500, n=50), read_file(HOST))
    table.feasible()
    assert {question for _, _, question, _ in asked} == {"unsupported"}
    assert table.memory.keys() == set(get("qr").names())
