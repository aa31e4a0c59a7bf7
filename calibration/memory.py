"""Memory: what candidates and guards predict of their peak, against what a fresh process really takes.

Every case runs in a child process of its own: arguments are made, the peak of resident memory that Linux keeps is
reset, the call runs (and its backward pass, where gradients are wanted), the peak is read. Linux only. `--check` runs
nothing and tells whether the committed figures and the table in docs/evidence.md still hold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import documents
import msgspec
from children import in_child
from footprints import Case, cases, predicted, run, subject
from rich.console import Console
from rich.table import Table

from autokern.core.registry import get, registered
from autokern.system import host

JSON = Path(__file__).parent / "memory.json"
DOCUMENT = Path(__file__).parent.parent / "docs" / "evidence.md"
WITHIN = 0.2
"""What a prediction may be off by, as a part of what is measured."""
LEAST = 200 * 2**20
"""Smaller peaks are not compared: interpreter and libraries take some megabytes too."""
console = Console(width=150)


class Row(msgspec.Struct, frozen=True):
    """A case with bytes predicted and measured."""

    case: Case
    predicted: int
    measured: int

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured

    @property
    def now(self) -> float:
        """What the code predicts now over what was measured; of some guards, what it predicted then: they need data."""
        case = self.case
        if case.what == "evaluate_kernel":
            return predicted(subject(case)[0]) / self.measured
        if case.problem.op == "guard":
            return self.ratio
        return get(case.what)[case.candidate].memory(case.problem) / self.measured


class Document(msgspec.Struct, frozen=True):
    """All rows, and the machine they were measured on."""

    host: dict[str, object]
    rows: list[Row]


def measured(case: dict[str, object]) -> dict[str, object]:
    """Measure one case in this process, which is to be a fresh one."""
    of = msgspec.convert(case, Case)
    return dict(msgspec.to_builtins(Row(of, *run(of))))


def of_child(case: Case) -> Row | str:
    """Measure one case in a fresh process; return why it failed, if it does."""
    found = in_child("memory", "measured", msgspec.to_builtins(case), environment={"AUTOKERN_CALIBRATE": "never"})
    return str(found["failed"]) if "failed" in found else msgspec.convert(found, Row)


def measure(chosen: Sequence[Case], at_once: int) -> list[Row]:
    found = []
    with ThreadPoolExecutor(at_once) as pool:
        for case, row in zip(chosen, pool.map(of_child, chosen), strict=True):
            if isinstance(row, str):
                console.print(f"[red]{case}: {row}")
                continue
            mark = "" if abs(row.ratio - 1) <= WITHIN or row.measured < LEAST else "[red]"
            console.print(f"{mark}{row.ratio:5.2f} {row.measured / 2**20:6.0f} MiB  {case}", highlight=False)
            found.append(row)
    return found


def read() -> Document:
    """Return the committed rows, without those of ops and candidates that are gone."""
    found = msgspec.json.decode(JSON.read_bytes(), type=Document)
    names = {op.name: op.names() for op in registered()}

    def there(row: Row) -> bool:
        case = row.case
        return case.problem.op == "guard" or case.candidate in names.get(case.what, ())

    return Document(found.host, [row for row in found.rows if there(row)])


def merged(rows: Sequence[Row]) -> list[Row]:
    """Return the committed rows with those that were measured now in their places."""
    known = {row.case: row for row in read().rows} | {row.case: row for row in rows}
    return [known[case] for case in cases() if case in known]


def groups(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows that are large enough, by op or guarded method."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.measured >= LEAST:
            found.setdefault(row.case.what, []).append(row)
    return found


def markdown(rows: Iterable[Row]) -> str:
    lines = ["| op or guarded method | cases | peaks in GiB | predicted / measured |", "|---|---|---|---|"]
    for what, mine in groups(rows).items():
        peaks, ratios = [row.measured / 2**30 for row in mine], [row.now for row in mine]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(f"| `{what}` | {len(mine)} | {min(peaks):.1f} to {max(peaks):.1f} | {spread} |")
    return "\n".join(lines) + "\n"


def refresh(rows: Iterable[Row], check: bool) -> bool:
    """Write the table into the docs, or with `check` return whether it is there."""
    return documents.refresh(DOCUMENT, "memory", markdown(rows), check)


def show(rows: Iterable[Row]) -> None:
    table = Table(title="memory: predicted / measured")
    for head in ("", "cases", "least", "most", "worst case"):
        table.add_column(head)
    for what, mine in groups(rows).items():
        worst = max(mine, key=lambda row: abs(row.now - 1))
        ratios = [row.now for row in mine]
        table.add_row(what, str(len(mine)), f"{min(ratios):.2f}", f"{max(ratios):.2f}", str(worst.case))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; 0 is fine, 1 a prediction that is too far off or a document out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="words that a case must have, by commas; other figures stay")
    parser.add_argument("--at-once", type=int, default=2, help="processes at once")
    parser.add_argument("--check", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    if options.check:
        rows = read().rows
    else:
        words = options.only.split(",")
        rows = measure([case for case in cases() if all(word in str(case) for word in words)], options.at_once)
        rows = merged(rows) if options.only else rows
        document = Document(host.current().fields, rows)
        JSON.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    show(rows)
    fine = all(abs(row.now - 1) <= WITHIN for mine in groups(rows).values() for row in mine)
    current = refresh(rows, options.check)
    return 0 if fine and (current or not options.check) else 1


if __name__ == "__main__":
    sys.exit(main())
