"""Problems with structure in their points as users ask for them by a word: completed, or refused where none occurs."""

from __future__ import annotations

from collections.abc import Collection

from autokern.core.errors import SettingsError
from autokern.core.problem import Problem
from autokern.gp import structure
from autokern.kernels.state_space import is_markov
from autokern.ops import _state_space
from autokern.ops._shared import families

__all__ = ["GRID", "REPEATS", "grid", "line", "repeats"]

GRID, REPEATS = "grid", "repeats"
_PART = 3
"""Of so many observations, one point differs from the others where the user does not say how many do."""


def line(problem: Problem, given: Collection[str]) -> Problem:
    """Return the problem with Matérn kernels on points of one dimension; `given` names what the user said.

    SettingsError if points of such a problem are not served as a line.
    """
    if ("d" in given and problem.d != 1) or problem.batch > 1:
        raise _refused(problem, _state_space.LINE, "it is one model of points with d=1")
    if problem.n < _state_space.ENOUGH:
        raise _refused(problem, _state_space.LINE, f"points count as a line from n={_state_space.ENOUGH} on")
    return problem.replace(d=1, variant=f"{problem.variant}/{_state_space.LINE}")


def of_matern(problem: Problem, given: Collection[str]) -> Problem:
    """Return a problem whose variant names a kernel that may be on a line; SettingsError if the user said another."""
    names = families(problem)
    if all(map(is_markov, names)):
        return problem
    if "variant" in given:
        raise _refused(problem, _state_space.LINE, f"its kernels are Matérn ones, and {'+'.join(names)} is not")
    return problem.replace(variant="/".join(("matern52", *problem.variant.split("/")[1:])))


def repeats(problem: Problem, given: Collection[str]) -> Problem:
    """Return the problem whose points repeat: `m` of them differ, a third where the user says nothing of it.

    SettingsError if so many points are not merged.
    """
    problem = problem if "m" in given else problem.replace(m=max(1, problem.n // _PART))
    if problem.m > structure.MOST_DISTINCT * problem.n:
        raise _refused(problem, REPEATS, f"equal points are merged where {structure.MOST_DISTINCT:.0%} differ at most")
    return _looked_at(problem, REPEATS)


def grid(problem: Problem, given: Collection[str]) -> Problem:
    """Return the problem whose points are a grid with `m` values along its longest axis, by default as few as can be.

    SettingsError if no grid has so many points.
    """
    problem = _looked_at(problem if "d" in given else problem.replace(d=2), GRID)
    n, longest = problem.n, int(structure.LONGEST * problem.n)
    asked = [problem.m] if "m" in given else range(2, longest + 1)
    found = next((m for m in asked if m <= longest and n % m == 0 and _covers(n // m, m, problem.d - 1)), None)
    if found is None:
        axes = f"{problem.m} values along its longest axis" if "m" in given else f"{problem.d} axes at most"
        most = f"{structure.LONGEST:.0%} of them along one axis"
        raise _refused(problem, GRID, f"{n:,} points are none with {axes}; it has two axes or more, at most {most}")
    return problem.replace(m=found, variant=f"{problem.variant}/{GRID}")


def _covers(rest: int, longest: int, axes: int) -> bool:
    """Whether so many axes, one at least, none of them longer than another, have so many points."""
    if axes < 1 or rest < 2:
        return False
    if rest <= longest:
        return True
    return any(rest % size == 0 and _covers(rest // size, size, axes - 1) for size in range(longest, 1, -1))


def _looked_at(problem: Problem, word: str) -> Problem:
    """Refuse a problem whose points are not looked at."""
    if problem.n < structure.LEAST:
        raise _refused(problem, word, f"it is looked for from n={structure.LEAST} on")
    if problem.batch > 1 or problem.device != "cpu" or "x" in problem.grad.split("/"):
        raise _refused(problem, word, "it is looked for in one set of points on the CPU that want no gradients")
    return problem


def _refused(problem: Problem, word: str, why: str) -> SettingsError:
    return SettingsError(f"structure {word!r} was asked for in the points of {problem}; {why}")
