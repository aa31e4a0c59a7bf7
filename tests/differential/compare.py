"""What differs between what stock told and what autokern told of the same program, in words.

float64 agrees to 1e-8 of the largest entry, times the scenario's `kappa`: with condition numbers of a few thousand,
two ways to compute the same differ by 1e-12, and 1e-8 leaves room for second derivatives. In float32, and where stock
only approximates, rounding has no such bound: there the error against the truth (stock in float64, by exact solves) is
at most twice stock's and `_SLACK`, in float32 three times: a single draw, by luck, is near to the truth.
"""

import fnmatch
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from table import Scenario
from ways import HOSTS, Told, enabled, runs, told

_TIGHT = 1e-8
_SLACK = {"float32": 1e-4, "float64": 1e-4}
"""A thousand eps, as in docs/promises.md; and of conjugate gradients that end elsewhere."""
_COUNTS_WHEN_STALE = ("likelihood",)
"""User code that is called as often as by stock even where a cache is made anew: foreign likelihoods."""


class Reference(NamedTuple):
    """What a result may be, and its truth where only that counts."""

    stock: Told
    truth: Told | None


def references(scenario: Scenario) -> list[Reference]:
    """Run a scenario as stock: as it is, as a fresh model would have it, and their truths."""
    of_truth = scenario.exact or scenario.dtype == "float32"

    def one(first: bool) -> Reference:
        return Reference(told(scenario, first=first), told(scenario, truth=True, first=first) if of_truth else None)

    by_formula = [Reference(told(scenario, formula=True), None)] if scenario.formula else []
    firsts = [False] if scenario.fresh else [True, False] if scenario.stale else [True]
    return [*map(one, firsts), *by_formula]


def differences(scenario: Scenario, known: list[Reference], found: Told) -> list[str]:
    """Return in words all in which a run differs from stock; nothing if it is right."""
    return list(_all(scenario, known, found))


def judged(scenario: Scenario, most: int = 99) -> dict[str, list[str]]:
    """Return what differs from stock in which way: with a recorded profile, `most` times by force, and by chance."""
    turn, known = zlib.crc32(scenario.name.encode()), references(scenario)
    with enabled():
        ways = runs(scenario, HOSTS[turn % len(HOSTS)], turn % 1000, most)
        found = {way: differences(scenario, known, told) for way, told in ways}
    return {way: texts for way, texts in found.items() if texts}


def _ignored(scenario: Scenario, fact: str) -> bool:
    return any(fnmatch.fnmatch(fact, pattern) for pattern in scenario.may)


def _all(scenario: Scenario, known: list[Reference], found: Told) -> Iterator[str]:
    stock = known[0].stock
    if stock.raised and not found.raised and _ignored(scenario, "raised"):
        return
    if found.raised not in {r.stock.raised for r in known}:
        yield f"raised {found.raised or 'nothing'} where stock raised {stock.raised or 'nothing'}"
        return
    heard = {r.stock.warned for r in known}
    if scenario.dtype == "float32":  # what is factorised in double precision may need no jitter
        heard |= {r.truth.warned for r in known if r.truth is not None}
    if not _ignored(scenario, "warnings") and found.warned not in heard:
        extra, missing = sorted(found.warned - stock.warned), sorted(stock.warned - found.warned)
        yield f"warned {extra} more and {missing} less than stock"
    drawn = {r.stock.state for r in known}
    if scenario.exact:  # stock's probes, or none as exact solves need
        drawn |= {r.truth.state for r in known if r.truth is not None}
    if not _ignored(scenario, "random state") and found.state not in drawn:
        yield "the random state is not stock's"
    for name, value in found.facts.items():
        if any(name in r.stock.facts for r in known) and not _ignored(scenario, name):
            told_of = [_gap(scenario, value, name, one) for one in known]
            if all(told_of):
                yield f"{name}: {told_of[0]}"
    names = [set(r.stock.facts) for r in known]
    apart = (set(found.facts) - set.union(*names)) | (set.intersection(*names) - set(found.facts))
    if apart := sorted(n for n in apart if not _ignored(scenario, n)):
        yield f"only one of both has {apart[:4]}"
    yield from _counted(scenario, stock, found)


def _counted(scenario: Scenario, stock: Told, found: Told) -> Iterator[str]:
    for name in sorted(stock.counts.keys() | found.counts.keys()):
        mine, theirs = found.counts.get(name, 0), stock.counts.get(name, 0)
        anew = bool(scenario.stale) and not any(part in name for part in _COUNTS_WHEN_STALE)
        if mine != theirs and not anew and not _ignored(scenario, f"calls of {name}"):
            yield f"{name} was called {mine} times, by stock {theirs} times"


def _gap(scenario: Scenario, value: Any, name: str, one: Reference) -> str:
    """Return what is wrong with a fact by one reference, or nothing."""
    stock = one.stock.facts.get(name)
    if not isinstance(value, torch.Tensor) or not isinstance(stock, torch.Tensor):
        return "" if value == stock else f"{value!r} where stock has {stock!r}"
    if value.shape != stock.shape or value.dtype != stock.dtype:
        return f"{value.dtype} {tuple(value.shape)} where stock has {stock.dtype} {tuple(stock.shape)}"
    if not value.numel():
        return ""
    if not value.is_floating_point():
        return "" if torch.equal(value, stock) else "other entries than stock's"
    mine, theirs = value.double(), stock.double()
    truth = one.truth.facts.get(name) if one.truth is not None and not one.truth.raised else None
    if truth is None or truth.shape != stock.shape:
        tight = _TIGHT if stock.dtype == torch.float64 else _SLACK["float32"]
        return _beyond(mine, theirs, tight * scenario.kappa, scenario.floor)
    if kinds := _kinds(mine, theirs):
        return kinds
    truth = truth.double()
    scale = _size(truth, scenario.floor if scenario.dtype == "float64" else 10 * scenario.floor)
    error, of_stock = (_largest(t - truth) / scale for t in (mine, theirs))
    bound = (3 if scenario.dtype == "float32" else 2) * of_stock + _SLACK[scenario.dtype] * max(
        scenario.kappa, one.truth.kappa
    )
    return "" if error <= bound else f"error {error:.2g}, stock's {of_stock:.2g}, bound {bound:.2g}"


def _kinds(mine: torch.Tensor, theirs: torch.Tensor) -> str:
    """Return in words that NaN or infinities are not at the same places, or nothing."""
    if all(torch.equal(of(mine), of(theirs)) for of in (torch.isnan, torch.isposinf, torch.isneginf)):
        return ""
    bad, of_stock = (int((~t.isfinite()).sum()) for t in (mine, theirs))
    return f"{bad} entries are not finite, {of_stock} of stock's, or not the same ones"


def _largest(t: torch.Tensor) -> float:
    return t.nan_to_num(0.0, 0.0, 0.0).abs().max().item()


def _size(t: torch.Tensor, floor: float) -> float:
    return max(_largest(t * t.isfinite()), floor)


def _beyond(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float, floor: float) -> str:
    if kinds := _kinds(mine, theirs):
        return kinds
    both = mine.isfinite() & theirs.isfinite()
    gap = _largest(torch.where(both, mine - theirs, 0.0)) / _size(theirs, floor)
    if gap <= tolerance:
        return ""
    worst = torch.where(both, (mine - theirs).abs(), 0.0).argmax()
    return f"off by {gap:.2g}, e.g. {mine.flatten()[worst]:.6g} where stock has {theirs.flatten()[worst]:.6g}"
