"""Reports on a program or a profile, each one self-contained HTML file, from the template `page.html`.

The seconds saved are, for each key, its calls times the predicted saving of one call. `core/output.py` calls `html` and
`frame`, which return single values for notebooks.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import markupsafe
import msgspec

from autokern.cli import summary, tables
from autokern.cli.tables import Served, Table
from autokern.core.decision import Cost, Decision, Solved, overall
from autokern.core.errors import AutokernError
from autokern.core.output import duration
from autokern.core.problem import Problem
from autokern.core.registry import known as is_known
from autokern.core.releases import __version__
from autokern.evaluation.served import Served as Model
from autokern.runtime import dispatch
from autokern.runtime.api import Explanation, replayed
from autokern.system import host
from autokern.system.files import write_whole
from autokern.tuning.profile import Profile

Page = dict[str, Any]

_MOST_CARDS = 40
_PATH = re.compile(r"(?<![\w./~\\])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\:;,'\"()<>]+){2,}[/\\]?")


def write(file: Path, page: Page) -> None:
    """Render a page and write it atomically."""
    write_whole(file, _templates().get_template("page.html").render(page=page).encode())


@functools.cache
def _templates() -> Any:
    def marked(text: str) -> markupsafe.Markup:  # text between backticks as code
        return markupsafe.Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(text))))

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    options: Any = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(loader=loader, **options)
    environment.globals.update(marked=marked)
    return environment


def without_paths(text: str) -> str:
    """Return text with an ellipsis for each path of this machine; variants of problems (``rbf/same/ard``) stay."""
    return _PATH.sub("…", text)


class Gain(NamedTuple):
    """Number of calls on measured problems, and the seconds that they saved by prediction."""

    calls: int = 0
    saved: float = 0.0

    def __str__(self) -> str:
        saved = f"−{duration(-self.saved)}" if self.saved < 0 else duration(self.saved) if self.saved else "0 s"
        return saved if self.calls else "not measured"


def gain(rows: Served) -> Gain:
    """Return the predicted savings of the calls of decisions."""
    found = [(calls, calls * d.saved) for d, calls in rows if d.saved is not None]
    return Gain(*map(sum, zip(*found, strict=True)))


def of_program(name: str, seconds: float, start: float | None = None) -> Page:
    """Return the page of the program that this process has run; `start`: seconds until its first call of a library."""
    served, fields = dispatch.decisions(), host.current().fields
    stats = [by for op, by in dispatch.stats().items() if is_known(op)]
    total, counted, stock = gain(served), sum(sum(by.values()) for by in stats), sum(by.get("stock", 0) for by in stats)
    known = f"{total.calls:,} of {counted:,} calls" if total.calls else "nothing is known of its keys"
    others = sum(decision.candidate != "stock" for decision, _ in served)
    ran = "first line to end" if start is None else f"of which {duration(start)} until its first call of a model"
    tiles = [
        ("program ran", duration(seconds), ran),
        ("calls served", f"{counted - stock:,}", f"by candidates; {stock:,} more by the library's own code"),
        ("keys decided", f"{len(served):,}", f"{others:,} run another candidate than stock"),
        ("saved, predicted", str(total), known),
    ]
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    note = "Parts of a composite op stand below it. It is compared with stock by the same parts, so savings add up."
    choices = msgspec.structs.replace(tables.decisions(served, lambda rows: str(gain(rows))), title="")
    parts = [_section("What ran, and why", note, tables=[_clean(choices)]), *_by_key(served)] if served else []
    notes = _notes(served, counted)
    return _page("run", Path(name).name, fields, f"{when} · ", tiles=tiles, notes=notes, sections=parts)


def _notes(served: Served, counted: int) -> list[str]:
    """Return notes on the basis of a program's figures, and on the calls that they leave out."""
    last = "Processes that the program started are not part of this page."
    if not served:
        off = "" if dispatch.session().settings.enabled else " (AUTOKERN=0)"
        return [f"autokern served no call in this process{off}.", last]
    notes = [
        "Seconds saved are predicted from measured times, not measured on this run: for each key, its calls times the "
        "predicted time of stock less that of the chosen candidate. `autokern compare` measures a whole program."
    ]
    told = {"other hosts": "rest on other machines' measurements", "extrapolated": "are extrapolated from measurements"}
    for source, what in told.items():
        part = gain([row for row in served if row[0].source == source])
        notes += [f"{part} of them {what}."] if part.saved else []
    unknown = [(d, calls) for d, calls in served if d.saved is None and d.source != "only choice"]
    if unknown:
        ops = ",".join(sorted({decision.problem.op for decision, _ in unknown}))
        count = f"{sum(calls for _, calls in unknown):,} calls are of keys of which nothing is measured"
        notes.append(f"{count}: what they saved is not counted. `autokern calibrate --ops {ops}` measures them.")
    if (further := counted - sum(calls for _, calls in served)) > 0:
        notes.append(f"{further:,} further calls are of decisions that this process no longer keeps.")
    return [*notes, *filter(None, [replayed()]), last]


def _by_key(served: Served) -> list[Page]:
    """Return the section of keys, each with its choice, reason and candidates, largest savings or losses first."""
    rows = sorted(served, key=lambda row: (-abs(gain([row]).saved), -row[1]))
    cards = []
    for decision, calls in rows[:_MOST_CARDS]:
        found = gain([(decision, calls)])
        factor = f", {decision.margin:.2f} times as fast as stock" if decision.margin != 1.0 else ""
        value = "no choice" if decision.source == "only choice" else str(found)
        lines = [*decision.notes(), *decision.meanings()]
        words = f"runs {decision.candidate}{factor}; {calls:,} {'call' if calls == 1 else 'calls'}"
        head = {"title": str(decision.problem), "words": words, "value": value}
        cards.append({**head, "lines": list(map(without_paths, lines)), "table": _clean(tables.candidates(decision))})
    notes = ["Each key names a problem; open it to see why its candidate was chosen. Largest differences first."]
    if rest := rows[_MOST_CARDS:]:
        notes.append(f"{len(rest):,} more keys are not listed (saved, predicted: {gain(rest)}).")
    return [_section("Saved by key", *notes, cards=cards)]


def of_profile(profile: Profile, shown: Sequence[Table], when: str, op: str | None = None) -> Page:
    """Return the page of the profile in force, or of one of its ops: what `autokern show` prints."""
    section = _section("Fastest candidates", tables=list(map(_clean, shown)))
    title, fields = f"Measurements of {op or 'this machine'}", profile.host or host.current().fields
    return _page("show", title, fields, tiles=[], notes=[when], sections=[section])


def _section(title: str, *notes: str, **parts: object) -> Page:
    return {"title": title, "notes": notes, "tables": [], "cards": [], **parts}


def _clean(table: Table) -> Table:
    return msgspec.structs.replace(table, rows=[[without_paths(cell) for cell in row] for row in table.rows])


def _page(kind: str, title: str, fields: Mapping[str, Any], before: str = "", **parts: object) -> Page:
    """Return a page with the measured host, whose fields name no machine, user or path."""
    gpus = [str(gpu.get("name", gpu.get("kind", ""))) for gpu in fields.get("accelerators", [])]
    cpu, torch_ = fields["cpu"], fields["versions"]["torch"]
    words = [str(cpu["model"]), *gpus, tables.counted(cpu["torch_threads"], "thread"), f"torch {torch_}"]
    about = {**fields, "gpus": gpus, "fingerprint": host.fingerprint_of(dict(fields)), "autokern": __version__}
    return {"kind": kind, "title": title, "words": before + ", ".join(words), "host": about, **parts}


def html(value: Decision | Explanation | Profile | Model) -> str:
    """Return a value as an HTML table, without colours of its own."""
    notes: list[str] = []
    if isinstance(value, Decision):
        table = tables.candidates(value, str(value.problem))
        notes = [*value.notes(), *value.meanings()]
    elif isinstance(value, Explanation):
        table = tables.decisions(value.decisions)
        notes = [replayed()]
    elif isinstance(value, Model):
        table = Table(value.title, ("part", "served by", "notes"), value.rows)
    else:
        table, bans = tables.ops(summary.known(value), repr(value)), value.banned
        notes = [f"{ban.op}.{ban.candidate} is banned on {ban.device} {ban.dtype}: {ban.reason}" for ban in bans]
    below = "".join(f"<div>{markupsafe.escape(note)}</div>" for note in filter(None, notes))
    return f"<div>{_templates().get_template('table.html').module.table_of(table)}{below}</div>"


def frame(value: Decision | Explanation | Profile | Model) -> Any:
    """Return a pandas data frame: a row for each candidate, decision, part, or measured problem and candidate."""
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    if isinstance(value, Decision):
        columns = ("candidate", "runs", *Cost.__struct_fields__, "cannot")
        rows = [(name, name == value.candidate, *_cells(cost, Cost), why) for name, cost, why in value.candidates()]
    elif isinstance(value, Explanation):
        told = ("candidate", "margin", "uncertainty", "source", "reason")
        columns = ("calls", "within", *Problem.__struct_fields__, *told, *Solved.__struct_fields__)
        rows = [
            (calls, " > ".join(one.within), *_cells(one.problem, Problem), *(getattr(one, name) for name in told),
             *_cells(overall(one.solved), Solved)) for one, calls in sorted(value.decisions, key=lambda pair: -pair[1])
        ]  # fmt: skip
    elif isinstance(value, Model):
        columns, rows = ("part", "by", "why"), value.rows
    else:
        columns = (*Problem.__struct_fields__, "candidate", "seconds", "speedup")
        timings = ((t.problem, *named) for t in value.trials for named in t.timings.items())
        rows = [(*_cells(of, Problem), name, timing.seconds, 1.0 / timing.ratio) for of, name, timing in timings]
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise AutokernError(f"to_frame() needs pandas; found: {error}. `pip install pandas` provides it") from error
    return pandas.DataFrame(rows, columns=list(columns))


def _cells(row: msgspec.Struct | None, kind: type[msgspec.Struct]) -> tuple[Any, ...]:
    return (math.nan,) * len(kind.__struct_fields__) if row is None else msgspec.structs.astuple(row)
