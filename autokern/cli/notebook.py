"""Decisions, explanations and profiles as HTML for notebooks, data frames and plots, on request of `core/shown.py`."""

from __future__ import annotations

import html as escaped
import importlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from autokern.cli import summary, tables
from autokern.core.decision import Cost, Decision
from autokern.core.errors import AutokernError, SettingsError
from autokern.core.problem import Problem
from autokern.core.solved import Solved, overall
from autokern.runtime.api import Explanation
from autokern.tuning.profile import Profile

__all__ = ["frame", "html", "installed", "plot"]

_MOST = 40
"""Most rows of a table in a notebook."""


def html(value: Decision | Explanation | Profile) -> str:
    """Return a value as an HTML table, without colours of its own."""
    if isinstance(value, Decision):
        return _table(tables.candidates(value, str(value.problem)), [*value.notes(), *value.meanings()])
    if isinstance(value, Explanation):
        return _table(tables.decisions(value.decisions))
    bans = [f"{ban.op}.{ban.candidate} is banned on {ban.device} {ban.dtype}: {ban.reason}" for ban in value.banned]
    return _table(tables.ops(summary.known(value), repr(value)), bans)


def _table(table: tables.Table, notes: Sequence[str] = ()) -> str:
    sides = ["right" if column.startswith(">") else "left" for column in table.columns]
    more = [f"and {len(table.rows) - _MOST:,} more: to_frame() has all"] if len(table.rows) > _MOST else []

    def cells(tag: str, row: Sequence[str]) -> str:
        texts = (escaped.escape(cell).replace("\n", "<br>") for cell in row)
        made = (
            f'<{tag} style="text-align:{side};vertical-align:top">{text}</{tag}>'
            for side, text in zip(sides, texts, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"

    head = cells("th", [column.removeprefix(">") for column in table.columns])
    body = "".join(cells("td", row) for row in table.rows[:_MOST])
    below = "".join(f"<div>{escaped.escape(note)}</div>" for note in (*more, *notes))
    heading = f"<div><strong>{escaped.escape(table.title)}</strong></div>"
    return f"<div>{heading}<table><thead>{head}</thead><tbody>{body}</tbody></table>{below}</div>"


def frame(value: Decision | Explanation | Profile) -> Any:
    """Return a pandas data frame: a row for each candidate, decision, or measured pair of problem and candidate."""
    columns: tuple[str, ...]
    rows: list[dict[str, Any]]
    if isinstance(value, Decision):
        columns = ("candidate", "runs", *Cost.__struct_fields__, "cannot")
        rows = [
            {"candidate": name, "runs": name == value.candidate, "cannot": why}
            | ({} if cost is None else msgspec.structs.asdict(cost))
            for name, cost, why in value.candidates()
        ]
    elif isinstance(value, Explanation):
        told = ("candidate", "margin", "uncertainty", "source", "reason")
        columns = ("calls", *Problem.__struct_fields__, *told, *Solved.__struct_fields__)
        rows = [
            {"calls": calls}
            | msgspec.structs.asdict(found.problem)
            | {name: getattr(found, name) for name in told}
            | ({} if (worst := overall(found.solved)) is None else msgspec.structs.asdict(worst))
            for found, calls in sorted(value.decisions, key=lambda pair: -pair[1])
        ]
    else:
        columns = (*Problem.__struct_fields__, "candidate", "seconds", "speedup")
        rows = [
            msgspec.structs.asdict(trial.problem)
            | {"candidate": name, "seconds": timing.seconds, "speedup": 1.0 / timing.ratio}
            for trial in value.trials
            for name, timing in trial.timings.items()
        ]
    return installed("pandas", "to_frame()").DataFrame(rows, columns=list(columns))


def plot(value: Decision | Explanation | Profile, ax: Any, *group: str) -> Any:
    """Draw a decision's predicted times, an explanation's calls, or a profile's times over sizes for one group."""
    if isinstance(value, Profile):
        op, device, dtype = group
        chosen = summary.commonest(value.trials, (op, dtype, device))
        if not chosen:
            known = ", ".join(sorted({t.problem.op for t in value.trials})) or "nothing"
            raise SettingsError(f"a plot of {op} on {device} in {dtype} was asked for; the profile knows {known}")
    ax = installed("matplotlib.pyplot", "plot()").subplots(layout="constrained")[1] if ax is None else ax
    if isinstance(value, Decision):
        names = list(reversed(value.predicted))
        colours = ["C1" if name == value.candidate else "C0" for name in names]
        ax.barh(names, [value.predicted[name] for name in names], color=colours)
        ax.set(xscale="log", xlabel="predicted seconds of a call", title=str(value.problem))
    elif isinstance(value, Explanation):
        counts: Counter[str] = Counter()
        for found, calls in value.decisions:
            counts[f"{found.problem.op}: {found.candidate}"] += calls
        names = sorted(counts, key=counts.__getitem__)
        ax.barh(names, [counts[name] for name in names])
        ax.set(xlabel="calls", title="what autokern ran")
    else:
        for name in dict.fromkeys(name for trial in chosen for name in trial.timings):
            of = [trial for trial in chosen if name in trial.timings]
            sizes, seconds = [t.problem.n for t in of], [t.timings[name].seconds for t in of]
            ax.plot(sizes, seconds, marker="o", linewidth=2.5 if name == "stock" else 1.2, label=name)
        ax.set(xscale="log", yscale="log", xlabel="n", ylabel="seconds of a call", title=chosen[0].problem.family)
        ax.legend(fontsize="small")
    return ax


def installed(name: str, what: str) -> Any:
    """Import a package that the feature `what` needs, or raise AutokernError."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise AutokernError(f"{what} needs {package}; found: {error}. `pip install {package}` provides it") from error
