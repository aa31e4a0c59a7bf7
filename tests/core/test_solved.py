"""core/decision.py: how systems were solved is noted by thread, collected by call, and told."""

import math

import msgspec
import pytest

from autokern.core import decision as solved
from autokern.core.decision import Solved
from autokern.core.state import inside

ONE = Solved(3e-6, 9, "vecchia", 10, 0.0123, 1e-5)


def collected(run):
    found = []
    with solved.collecting(found.extend):
        run()
    return found


def test_what_is_noted_is_collected_within_and_around_and_before_an_exception():
    inner, found = [], []

    def call():
        solved.note(ONE)
        inner.extend(collected(lambda: solved.note(ONE)))
        with inside.having(solves=None):
            solved.note(ONE)
            collected(lambda: solved.note(ONE))
        raise ValueError("it failed")

    with pytest.raises(ValueError, match="it failed"), solved.collecting(found.extend):
        call()
    assert (found, inner) == ([ONE, ONE], [ONE])


def test_the_worst_of_several_is_told_for_each_preconditioner():
    other = Solved(1e-2, 100, "vecchia", 10, None, 1e-6, missed=1)
    third = Solved(0.64, 23, "other", 11, goal=1.0)
    found = solved.joined([ONE, third, other])
    assert found == (Solved(1e-2, 100, "vecchia", 10, 0.0123, 1e-6, 2, 1), third)
    assert solved.joined([*found, *found])[1].solves == 2
    assert solved.overall(found) == Solved(0.64, 100, "vecchia, other", 11, 0.0123, 1e-6, 3, 1)
    assert solved.joined([]) == ()
    assert solved.overall([]) is None


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Solved(0.6, 23, "vecchia", 11), "solved to a residual of 0.6 in 23 iterations, preconditioner vecchia"),
        (Solved(2e-6, 5, "pivoted", 3, solves=1200), "2e-06, the worst of 1,200 solves, in 5 iterations"),
        (Solved(2e-2, 5, "pivoted", 3, goal=1e-5, missed=1), "; stopped before the 1e-05 that was asked for"),
        (Solved(2e-2, 5, "pivoted", 3, goal=1e-5, solves=9, missed=2), "; 2 of 9 stopped before the 1e-05"),
        (Solved(2e-6, 5, "pivoted", 1, math.inf), "; log density of unknown error by 1 probe"),
    ],
)
def test_it_reads_as_a_sentence(found, told):
    assert told in str(found)


def test_an_unknown_error_is_none_in_json():
    text = msgspec.json.encode(Solved(2e-6, 5, "pivoted", 1, math.inf))
    assert msgspec.json.decode(text, type=Solved).standard_error is None
