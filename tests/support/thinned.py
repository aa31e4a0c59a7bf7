"""Tests of many cells, thinned: the fast run keeps a covering of their parameters, ``-m slow`` runs the rest."""

import itertools
import random
from collections import defaultdict

import pytest

TOLD = (
    "thin(*sets): all combinations of each set of parameters ('kernel candidate') occur in the fast run, by default "
    "of each two; cells beyond those are slow"
)


def covering(cells: list[dict[str, int]], sets: list[list[str]]) -> list[int]:
    """Return which cells meet every combination that all meet, by the identity of each parameter's value.

    Of those that meet as many new ones as any the next is taken, in an order that is shuffled alike in every run, so
    that values which need not meet all others meet different ones.
    """
    met = [[(k, *(cell[name] for name in names)) for k, names in enumerate(sets)] for cell in cells]
    known: set[tuple[int, ...]] = set()
    kept, order = [], random.Random(1).sample(range(len(met)), len(met))
    for least in range(len(sets), 0, -1):
        for k in order:
            if sum(combination not in known for combination in met[k]) >= least:
                known.update(met[k])
                kept.append(k)
    return kept


def mark_the_rest(items: list[pytest.Item]) -> None:
    """Mark as slow what `thin` does not keep of each test that has this mark."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("thin"):
            tests[item.parent, item.originalname].append(item)
    for cells in tests.values():
        values = [{name: id(value) for name, value in cell.callspec.params.items()} for cell in cells]
        told = [names.split() for names in cells[0].get_closest_marker("thin").args]
        sets = told or [list(pair) for pair in itertools.combinations(values[0], 2)]
        for k in set(range(len(cells))).difference(covering(values, sets)):
            cells[k].add_marker(pytest.mark.slow)
