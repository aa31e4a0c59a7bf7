"""The report of a profile: the fastest candidates by size, with the plots that they follow from."""

from __future__ import annotations

from collections.abc import Sequence

from autokern.cli.report import machine
from autokern.cli.report.page import Page, Plot, Section, Table, Tile, without_paths
from autokern.cli.report.sweep import commonest, sweep
from autokern.cli.summary import Known
from autokern.core.units import duration
from autokern.runtime import dispatch
from autokern.system import host
from autokern.tuning.profile import Profile

__all__ = ["of_profile"]

_MOST_WINNERS = 400


def of_profile(profile: Profile, found: Known, op: str | None = None) -> Page:
    """Return the page of the profile in force, or of one op of it.

    With an op every measured problem is listed.
    """
    fields = profile.host or host.current().fields
    rows, speedups = [], [row.speedup - 1.0 for row in found.ops]
    for row in found.ops:
        crossings = [f"{c.below} to {c.size:,.0f}" for c in row.crossovers]
        words = ", ".join([*crossings, row.crossovers[-1].above]) if row.crossovers else row.fastest
        banned = f"; banned: {', '.join(row.banned)}" if row.banned else ""
        place = f"{row.device}\N{NO-BREAK SPACE}{row.dtype}"
        rows.append([row.op, place, row.measured, f"{row.speedup:.2f}", words + banned])
    longest = max(speedups, default=0.0)
    columns = ["op", "on", ">problems", ">× stock", "fastest by size"]
    bars = [max(value, 0.0) / longest if longest > 0 else 0.0 for value in speedups]
    notes = [
        "× stock is the geometric mean, over the problems measured, of stock's time over that of the fastest "
        "candidate; sizes are of single matrices without gradients, counts of problems. Disturbed: other programs used "
        "the cores meanwhile."
    ]
    sections = [
        Section(title="Fastest candidates", tables=[Table(columns, rows, bars, "gain over stock")], notes=notes)
    ]
    sections += [*_plots(profile, found), *_winners(found), *_rest(found)]
    sections.append(machine.host_section(fields, profile.fingerprint))
    problems = sum(row.problems for row in found.ops)
    tiles = [
        Tile("problems measured", f"{problems:,}", f"of {len({row.op for row in found.ops})} ops"),
        Tile("banned", f"{len(found.banned):,}", "candidates that were wrong or failed here"),
        Tile("last measured", found.created[:10] or "–", found.created[11:16] and f"{found.created[11:16]} UTC"),
    ]
    title = f"Measurements of {op}" if op else "Measurements of this machine"
    return Page(kind="show", title=title, words=machine.in_short(fields), tiles=tiles, sections=sections)


def _plots(profile: Profile, found: Known) -> list[Section]:
    """Return a plot of each op, device and dtype: the kind of problem of which most sizes were measured."""
    there = set(host.current().devices)
    plots: list[Plot] = []
    for row in found.ops:
        chosen = commonest(profile.trials, (row.op, row.dtype, row.device))
        if row.device not in there or not chosen:
            continue
        sizes = [trial.problem.n for trial in chosen]
        low, high = (min(sizes), max(sizes)) if len(set(sizes)) > 1 else (max(2, sizes[0] // 4), sizes[0] * 4)
        plot = sweep(chosen[len(chosen) // 2].problem, low, high, dispatch.explain, profile.trials)
        plots += [plot] if any(len(line.x) > 1 for line in plot.lines) else []
    note = (
        "Predicted time of a call over its size, both logarithmic, for the kind of problem of which most sizes were "
        "measured. A band is one standard deviation of a candidate's ratio to stock; dots are measurements; the strip "
        "below says what would run."
    )
    return [Section(title="Where candidates cross", plots=plots, notes=[note])] if plots else []


def _winners(found: Known) -> list[Section]:
    """Return the fastest candidate of every measured problem, where one op was asked for."""
    if not found.winners:
        return []
    rows = [
        [str(w.problem), w.candidate, f"{w.speedup:.2f}", duration(w.seconds), duration(w.stock_seconds)]
        for w in found.winners[:_MOST_WINNERS]
    ]
    more = len(found.winners) - len(rows)
    notes = [f"{more:,} more are in `autokern show OP --json`."] if more else []
    table = Table(["problem", "fastest", ">× stock", ">time", ">stock"], rows)
    return [Section(title="Measured problems", tables=[table], notes=notes)]


def _rest(found: Known) -> list[Section]:
    """Return bans, candidates of lower precision and times of compiling, where there are any."""
    parts: list[tuple[str, list[str], Sequence[list[str]]]] = [
        ("Banned on this host", ["candidate", "on", "reason"],
         [[f"{b.op}.{b.candidate}", f"{b.device} {b.dtype}", without_paths(b.reason)] for b in found.banned]),
        ("Lower precision, only when asked for", ["op", "on", "candidate", ">problems", ">× best", ">error"],
         [[r.op, f"{r.device} {r.dtype}", r.candidate, f"{r.problems:,}", f"{r.speedup:.2f}", f"{r.relative_error:.0e}"]
          for r in found.rough]),
        ("Before a first call", ["candidate", ">takes"],
         [[name, duration(seconds)] for name, seconds in found.setup.items()]),
    ]  # fmt: skip
    return [Section(title=title, tables=[Table(columns, list(rows))]) for title, columns, rows in parts if rows]
