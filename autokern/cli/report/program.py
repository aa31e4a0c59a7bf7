"""The report of a program: seconds saved as predicted, what was chosen and why, at which sizes that changes.

The program is not measured: the seconds are calls of each key, times what one call is predicted to save.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from autokern.cli.report import machine
from autokern.cli.report.page import Card, Page, Plot, Section, Table, Tile, without_paths
from autokern.cli.report.sweep import kind, sweep
from autokern.core.decision import Decision
from autokern.core.problem import Problem
from autokern.core.units import duration, sized
from autokern.runtime import dispatch
from autokern.system import host

__all__ = ["of_program"]

_MOST_CARDS, _MOST_PLOTS, _MOST_LARGE = 40, 8, 8
_AROUND = 4
"""Times the sizes that a program asked, up and down, that its plots reach."""

Served = Sequence[tuple[Decision, int]]


class Gain(msgspec.Struct, frozen=True):
    """Calls, predicted seconds of them by stock and by what ran, and the bounds of the difference."""

    calls: int = 0
    stock: float = 0.0
    own: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def __add__(self, other: Gain) -> Gain:
        return Gain(
            *(a + b for a, b in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True))
        )

    @property
    def saved(self) -> float:
        """Seconds."""
        return self.stock - self.own

    def __str__(self) -> str:
        return signed(self.saved)


Gains = Sequence[tuple[Decision, int, Gain | None]]


def gain(decision: Decision, calls: int) -> Gain | None:
    """Return what calls of a decided problem are predicted to have saved; None where nothing was measured."""
    found = decision.saved
    if found is None:
        return None
    own = decision.predicted[decision.candidate]
    return Gain(calls, calls * (own + found[0]), calls * own, calls * found[1], calls * found[2])


def signed(seconds: float) -> str:
    """Return seconds as text with their sign where it is negative."""
    return f"−{duration(-seconds)}" if seconds < 0 else duration(seconds) if seconds else "0 s"


def of_program(name: str, seconds: float) -> Page:
    """Return the page of the program that this process has run."""
    here, found = dispatch.session(), dispatch.decisions()
    gains = [(decision, calls, gain(decision, calls)) for decision, calls in found]
    known = [g for *_, g in gains if g is not None]
    total = sum(known, Gain())
    counted, listed = sum(sum(by.values()) for by in dispatch.stats().values()), sum(calls for _, calls in found)
    notes = [
        "Seconds saved are predicted from measured times, not measured on this run: for each key, its calls times the "
        "predicted time of stock less that of what ran. `autokern compare` measures what a program saves as a whole."
    ]
    notes += _sources(gains)
    unknown = [(d, calls) for d, calls, one in gains if one is None and d.source != "only choice"]
    if unknown:
        ops = ",".join(sorted({decision.problem.op for decision, _ in unknown}))
        notes.append(
            f"{sum(calls for _, calls in unknown):,} calls are of keys of which nothing is measured: what they saved "
            f"is not counted. `autokern calibrate --ops {ops}` measures them."
        )
    if counted > listed:
        notes.append(f"{counted - listed:,} further calls are of decisions that this process no longer keeps.")
    if not found:
        off = "" if here.settings.enabled else " (AUTOKERN=0)"
        notes = [f"autokern served no call in this process{off}."]
    notes.append("Processes that the program started are not part of this page.")
    others = sum(decision.candidate != "stock" for decision, _ in found)
    tiles = [
        Tile(
            "saved, predicted",
            str(total) if known else "not known",
            f"{_bounds(total)}, {total.calls:,} of {counted:,} calls" if known else "nothing is measured",
        ),
        Tile("program ran", duration(seconds), "first line to end, measured"),
        Tile("calls served", f"{counted:,}", f"of {len({d.problem.op for d, _ in found})} ops"),
        Tile("keys decided", f"{len(found):,}", f"{others:,} run another candidate than stock"),
    ]
    gains.sort(key=lambda row: (-(abs(row[2].saved) if row[2] else -1.0), -row[1]))
    fields = host.current().fields
    sections = [
        _by_op(gains), *_crossovers(found), _by_key(gains), _threads(found), _memory(found),
        machine.host_section(fields, host.current().fingerprint),
    ]  # fmt: skip
    words = f"{machine.now()} · {machine.in_short(fields)}"
    return Page(kind="run", title=name, words=words, tiles=tiles, notes=notes, sections=[s for s in sections if s])


def _sources(gains: Gains) -> list[str]:
    """Return in words how much of the seconds no measurement of this machine supports."""
    told = {
        "other hosts": "rest on what other machines measured",
        "extrapolated": "are extrapolated from measurements of this machine",
    }
    words = []
    for source, what in told.items():
        part = sum((found for decision, _, found in gains if found and decision.source == source), Gain())
        if part.saved:
            words.append(f"{part} of them {what}.")
    return words


def _bounds(total: Gain) -> str:
    return f"{signed(total.low)} to {signed(total.high)} at one standard deviation"


def _by_op(gains: Gains) -> Section | None:
    """Return the section of seconds saved by op and candidate."""
    sums: dict[str, Gain] = {}
    calls: Counter[str] = Counter()
    ran: dict[str, Counter[str]] = {}
    for decision, count, found in gains:
        op = decision.problem.op
        calls[op] += count
        ran.setdefault(op, Counter())[decision.candidate] += count
        if found is not None:
            sums[op] = sums.get(op, Gain()) + found
    if not calls:
        return None
    order = sorted(calls, key=lambda op: (-sums.get(op, Gain()).saved, op))
    rows = []
    for op in order:
        one, names = sums.get(op), ", ".join(f"{name} {count:,}" for name, count in ran[op].most_common(4))
        more = f", {len(ran[op]) - 4} more" if len(ran[op]) > 4 else ""
        predicted = ("–", "–", "not measured") if one is None else (duration(one.stock), duration(one.own), str(one))
        rows.append([op, f"{calls[op]:,}", names + more, *predicted])
    columns = ["op", ">calls", "what ran, calls", ">stock", ">autokern", ">saved, predicted"]
    table = Table(columns, rows, _bars([sums.get(op, Gain()).saved for op in order]), "saved")
    note = "Times are of all calls of an op, as predicted. Ops that call others, which are served too, include those."
    return Section(title="Saved by op", tables=[table], notes=[note])


def _bars(values: Sequence[float]) -> list[float]:
    longest = max(map(abs, values), default=0.0)
    return [value / longest if longest else 0.0 for value in values]


def _by_key(gains: Gains) -> Section | None:
    """Return the section of keys, each with the choice, the reason and its candidates."""
    if not gains:
        return None
    shown, rest = gains[:_MOST_CARDS], gains[_MOST_CARDS:]
    longest = max((abs(found.saved) for *_, found in gains if found), default=0.0)
    cards = []
    for decision, calls, found in shown:
        factor = f", {decision.margin:.2f} times as fast as stock" if decision.candidate != "stock" and found else ""
        said = [line.strip() for line in str(decision).split("\n")[1:] if line[2] not in " →"]
        unknown = "no choice" if decision.source == "only choice" else "not measured"
        value = unknown if found is None else str(found)
        if found is not None and found.saved:
            said.append(f"saved, predicted: {value}, {_bounds(found)}")
        cards.append(
            Card(
                title=str(decision.problem),
                words=f"runs {decision.candidate}{factor}; {calls:,} {'call' if calls == 1 else 'calls'}",
                value=value,
                bar=found.saved / longest if found and longest else 0.0,
                lines=list(map(without_paths, said)),
                table=_candidates(decision),
            )
        )
    notes = ["The key names a problem; each opens and says why its candidate was chosen. Largest differences first."]
    if rest:
        more = sum((found for *_, found in rest if found), Gain())
        notes.append(f"{len(rest):,} more keys, with {more} predicted to be saved, are not listed.")
    return Section(title="Saved by key, and why", cards=cards, notes=notes)


def _candidates(decision: Decision) -> Table:
    rows = []
    for name, cost, why in decision.candidates():
        words = ("", "", "", "") if cost is None or cost.seconds is None else cost.words()
        rows.append([name, *words, "runs" if name == decision.candidate else why and f"cannot: {without_paths(why)}"])
    return Table(["candidate", ">latency", ">throughput", ">memory", ">error", ""], rows)


def _crossovers(found: Served) -> list[Section]:
    """Return the section of plots: the kinds of problems on which stock would spend most, or that were called most."""
    kinds: dict[object, list[tuple[Problem, float]]] = {}
    for decision, calls in found:
        one = gain(decision, calls)
        if one is not None and len(decision.predicted) > 1:
            some = decision.problem.replace(batch=min(decision.problem.batch, 2))  # one plot for all batches
            kinds.setdefault(kind(some), []).append((decision.problem, one.stock))
    heavy = sorted(kinds.values(), key=lambda of: -sum(stock for _, stock in of))
    plots: list[Plot] = []
    trials = dispatch.session().profile.trials
    for of in heavy[:_MOST_PLOTS]:
        problem = max(of, key=lambda row: row[1])[0]
        sizes = [p.n for p, _ in of if kind(p) == kind(problem)]
        low, high = max(2, min(sizes) // _AROUND), math.ceil(max(sizes) * _AROUND)
        plot = sweep(problem, low, high, dispatch.explain, trials, sizes)
        plots += [plot] if any(len(line.x) > 1 for line in plot.lines) else []
    if not plots:
        return []
    notes = [
        "Predicted time of a call over its size, both logarithmic. A band is one standard deviation of the ratio to "
        "stock; dots are measurements of this machine; ticks above are sizes that the program asked; the strip "
        "below says what runs. Of several batches the one is shown on which stock would spend most."
    ]
    if len(heavy) > len(plots):
        notes.append(f"The {len(plots)} kinds of problems on which stock would spend most, of {len(heavy)}.")
    return [Section(title="Where candidates cross", plots=plots, notes=notes)]


def _threads(found: Served) -> Section:
    fewer = sum(calls for decision, calls in found if "@" in decision.candidate)
    facts = [*machine.thread_facts(), ("calls by a candidate with fewer threads", f"{fewer:,}")]
    return Section(title="Threads", facts=facts)


def _memory(found: Served) -> Section:
    """Return the section of memory: the process, the limit, and the largest calls."""
    large = [(d, d.costs[d.candidate].memory) for d, _ in found if d.candidate in d.costs]
    large.sort(key=lambda row: -row[1])
    rows = []
    for decision, most in large[:_MOST_LARGE]:
        stock = decision.costs.get("stock")
        rows.append([str(decision.problem), decision.candidate, sized(most), sized(stock.memory) if stock else "–"])
    tables = [Table(["largest calls", "runs", ">takes", ">stock takes"], rows)] if rows else []
    note = "Bytes of calls are counted, results included, not measured."
    facts = machine.memory_facts(dispatch.session().settings)
    return Section(title="Memory", facts=facts, tables=tables, notes=[note] if rows else [])
