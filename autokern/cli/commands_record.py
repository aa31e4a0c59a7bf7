"""The command `record`, for the help of the command line and its tests; `app` runs it without importing typer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autokern.cli import record
from autokern.cli.console import Explain, Module, Stats, app
from autokern.core.settings import WORKLOAD

_FILE = f"The file that is added to (default: AUTOKERN_RECORD, or {WORKLOAD})."


@app.command(
    "record",
    options_metavar="[OPTIONS] SCRIPT | -m MODULE [ARGS]...",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def record_program(
    context: typer.Context,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help=_FILE)] = None,
    module: Module = None,
    stats: Stats = False,
    decisions: Explain = False,
) -> None:
    """Record which problems a program asks.

    It runs as by `run`; `calibrate --workload` measures what was recorded. Recordings of several programs add up in a
    file. Python processes that the program starts are recorded too. What ends by a signal or by os._exit is not.
    """
    flags = ["--stats"] * stats + ["--explain"] * decisions + (["-m", module] if module else [])
    order = record.parse([*([] if output is None else ["--output", str(output)]), *flags, *context.args])
    raise typer.Exit(0 if order is None else record.execute(order))
