"""Decisions, explanations and profiles as HTML for notebooks and as data frames, on request of `core/units.py`."""

from __future__ import annotations

import html as escaped
import importlib
from typing import Any

import msgspec

from autokern.cli import report, summary, tables
from autokern.core.decision import Cost, Decision
from autokern.core.errors import AutokernError
from autokern.core.problem import Problem
from autokern.core.solved import Solved, overall
from autokern.evaluation.served import Served
from autokern.runtime import api
from autokern.runtime.api import Explanation
from autokern.tuning.profile import Profile


def html(value: Decision | Explanation | Profile | Served) -> str:
    """Return a value as an HTML table, without colours of its own."""
    notes: list[str] = []
    if isinstance(value, Decision):
        table = tables.candidates(value, str(value.problem))
        notes = [*value.notes(), *value.meanings()]
    elif isinstance(value, Explanation):
        table = tables.decisions(value.decisions)
        notes = [api.replayed()]
    elif isinstance(value, Served):
        table = tables.Table(value.title, ("part", "served by", "notes"), value.rows)
    else:
        table = tables.ops(summary.known(value), repr(value))
        notes = [
            f"{ban.op}.{ban.candidate} is banned on {ban.device} {ban.dtype}: {ban.reason}" for ban in value.banned
        ]
    below = "".join(f"<div>{escaped.escape(note)}</div>" for note in filter(None, notes))
    return f"<div>{report.html(table)}{below}</div>"


def frame(value: Decision | Explanation | Profile | Served) -> Any:
    """Return a pandas data frame: a row for each candidate, decision, part, or measured problem and candidate."""
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
        columns = ("calls", "within", *Problem.__struct_fields__, *told, *Solved.__struct_fields__)
        rows = [
            {"calls": calls, "within": " > ".join(found.within)}
            | msgspec.structs.asdict(found.problem)
            | {name: getattr(found, name) for name in told}
            | ({} if (worst := overall(found.solved)) is None else msgspec.structs.asdict(worst))
            for found, calls in sorted(value.decisions, key=lambda pair: -pair[1])
        ]
    elif isinstance(value, Served):
        columns = ("part", "by", "why")
        rows = [dict(zip(columns, row, strict=True)) for row in value.rows]
    else:
        columns = (*Problem.__struct_fields__, "candidate", "seconds", "speedup")
        rows = [
            msgspec.structs.asdict(trial.problem)
            | {"candidate": name, "seconds": timing.seconds, "speedup": 1.0 / timing.ratio}
            for trial in value.trials
            for name, timing in trial.timings.items()
        ]
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise AutokernError(f"to_frame() needs pandas; found: {error}. `pip install pandas` provides it") from error
    return pandas.DataFrame(rows, columns=list(columns))
