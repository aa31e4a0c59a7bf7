"""One scenario in all ways: how many runs that took, and what differs in which."""

from __future__ import annotations

import zlib

from compare import differences, references
from table import Scenario
from ways import HOSTS, briefly, enabled, runs


def judged(
    scenario: Scenario, both: bool = False, most: int = 99, brief: bool = False
) -> tuple[int, dict[str, list[str]]]:
    """Return the number of runs, and what differs from stock by the way in which it does.

    Each scenario is run with one of the recorded profiles, by turns, or with `both`; or with `brief` in two ways
    only, by turns too.
    """
    turn = zlib.crc32(scenario.name.encode())
    hosts = HOSTS if both else [HOSTS[turn % len(HOSTS)]]
    known = references(scenario)
    made, found = sum(2 if one.truth else 1 for one in known), {}
    with enabled():
        for way, told in briefly(scenario, turn) if brief else runs(scenario, hosts, (turn % 1000,), most):
            made += 1
            if texts := differences(scenario, known, told):
                found[way] = texts
    return made, found
