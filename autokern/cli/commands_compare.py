"""The command `compare`: what autokern saves a program."""

from __future__ import annotations

from typing import Annotated

import typer

from autokern.cli import compare, run
from autokern.cli.console import Json, Module, app, emit, message
from autokern.core.errors import SettingsError
from autokern.core.units import legible
from autokern.runtime import api, dispatch


@app.command(
    "compare",
    options_metavar="[OPTIONS] [--] SCRIPT | -m MODULE [ARGS]...",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def compare_program(
    context: typer.Context,
    module: Module = None,
    pairs: Annotated[int, typer.Option(metavar="N", min=1, help="Most pairs of runs.")] = 20,
    budget: Annotated[float, typer.Option(metavar="S", min=0.0, help="Seconds after which no pair begins.")] = 600.0,
    json: Json = False,
) -> None:
    """Say what autokern saves a program.

    The program runs without and with autokern in turn, until the difference is known. Its standard output is not
    shown. Exit status 1: the difference is not known well enough.
    """
    order = run.parse([*(["-m", module] if module else []), *context.args], "compare")
    if order is None:
        raise typer.Exit(0)
    run.check(order)
    if not dispatch.session().settings.enabled:
        raise SettingsError("AUTOKERN=0 leaves nothing to compare with stock; unset it")
    if not api.profile().trials:
        message("nothing was measured on this machine yet; `autokern calibrate` does in 20 s")
    found = compare.compare(order, pairs, budget, message)
    if json:
        emit(found)
    else:
        typer.echo(legible(str(found)))
    for doubt in found.warnings:
        message(f"warning: {doubt}")
    raise typer.Exit(0 if found.known else 1)
