"""The commands of the command line, each a thin layer over a function of the package.

With ``--json`` they print one JSON document; progress and errors go to standard error. Exit status: 0 fine, 1 a
finding, 2 a usage error, 130 interrupted. Help loads modules lazily, so modules rather than names are imported.
"""

from __future__ import annotations

import os
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from autokern import __version__  # waits for the package where another thread imports it
from autokern.cli import app as runner
from autokern.cli import compare, doctor, inherited
from autokern.cli.commands_measured import Json, answer, calibrate, clear, emit, export, message, show
from autokern.core.errors import AutokernError, AutokernWarning, SettingsError
from autokern.core.output import legible
from autokern.core.releases import installed
from autokern.runtime import api, dispatch
from autokern.tuning import calibration

_PROGRAM = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
_GRAD = "Gradients wanted: a; of a kernel matrix theta, x, theta/x."
_VARIANT = "E.g. rbf/same/ard, matern52/cross/iso, lower."
_Module = Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module, as python does.")]


class _Commands(TyperGroup):
    """Prints every error of autokern as one message, and its warnings without source lines."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command of a context."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", AutokernWarning)
            usual = warnings.showwarning

            def shown(text: Any, category: type[Warning], *place: Any, **more: Any) -> None:
                message(str(text)) if issubclass(category, AutokernWarning) else usual(text, category, *place, **more)

            warnings.showwarning = shown  # type: ignore[assignment]
            try:
                return super().invoke(ctx)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(0) from None
            except AutokernError as error:
                message(str(error))
                raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    help="Measure this machine once, and let GPyTorch take the fastest path on every call.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: its panels show <bool> behind each flag
    context_settings={"help_option_names": ["-h", "--help"]},
)
profiles = typer.Typer(no_args_is_help=True)


def _version(asked: bool) -> None:
    if asked:
        libraries = ", ".join(f"{name} {installed(name)}" for name in ("torch", "gpytorch", "linear_operator"))
        typer.echo(f"autokern {__version__} ({libraries})")
        raise typer.Exit


_Version = typer.Option("--version", callback=_version, is_eager=True, help="Print versions and exit.")


@app.callback()
def _global(version: Annotated[bool, _Version] = False) -> None:
    pass


app.command()(calibrate)


@app.command("compare", options_metavar="[OPTIONS] [--] SCRIPT | -m MODULE [ARGS]...", context_settings=_PROGRAM)
def compare_program(
    context: typer.Context,
    module: _Module = None,
    pairs: Annotated[int, typer.Option(metavar="N", min=1, help="Most pairs of runs.")] = 20,
    budget: Annotated[float, typer.Option(metavar="S", min=0.0, help="Seconds after which no pair begins.")] = 600.0,
    form: Annotated[str, typer.Option("--format", metavar="FORM", help="text or markdown.")] = "text",
    json: Json = False,
) -> None:
    """Say what autokern saves a program.

    The program runs without and with autokern in turn, until the difference is known. Its standard output is not
    shown. Exit status 1: the difference is not known well enough.
    """
    order = runner.parse([*(["-m", module] if module else []), *context.args], "compare")
    if order is None:
        raise typer.Exit(0)
    runner.check(order)
    if form not in compare.FORMS:
        raise SettingsError(f"--format {form} was asked for; there are {', '.join(compare.FORMS)}")
    if not dispatch.session().settings.enabled:
        raise SettingsError("AUTOKERN=0 leaves nothing to compare with stock; unset it")
    if not api.profile().trials:
        message("nothing was measured on this machine yet; `autokern calibrate` measures it in 20 s")
    found = compare.compare(order, pairs, budget, message)
    if json:
        emit(found)
    else:
        typer.echo(legible(compare.FORMS[form](found)))
    for doubt in found.warnings:
        message(f"warning: {doubt}")
    raise typer.Exit(0 if found.known else 1)


@app.command("run", options_metavar="[OPTIONS] SCRIPT | -m MODULE | -c CODE | - [ARGS]...", context_settings=_PROGRAM)
def run_program(
    context: typer.Context,
    module: _Module = None,
    decisions: Annotated[bool, typer.Option("--explain", help="At the end, list decisions and calls.")] = False,
    lines: Annotated[bool, typer.Option("--profile", help="At the end, list seconds by line of the program.")] = False,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="At the end, write a page: savings, why.")] = None,
) -> None:
    """Run a program with autokern enabled.

    A script, a module, -c CODE or - (standard input) runs just as python would run it. Options of autokern come before
    it; everything after belongs to the program.

    Python processes that it starts are served too (AUTOKERN_WORKERS=0: forked ones only).
    """
    flags = ["--explain"] * decisions + ["--profile"] * lines + (["--report", str(report)] if report else [])
    raise typer.Exit(runner.started([*flags, *(["-m", module] if module else []), *context.args]) or 0)


@app.command("everywhere")
def switch_everywhere(
    state: Annotated[str, typer.Argument(metavar="on|off|status", help="What to do.")] = "status",
    yes: Annotated[bool, typer.Option("--yes", help="Also outside of a virtual environment.")] = False,
    json: Json = False,
) -> None:
    """Enable autokern in all programs of this environment.

    One file in its site-packages enables autokern in each Python process that imports GPyTorch or linear_operator.
    AUTOKERN=0 keeps it off in a process.
    """
    if state not in ("on", "off", "status"):
        raise SettingsError(f"{state!r} was asked for; there are on, off and status")
    if state != "status":
        inherited.switch(state == "on", yes)
    found, words = inherited.state(), {"stale": "on for an autokern that lies elsewhere; `everywhere on` renews it"}
    line = f"{words.get(found, found)}: {inherited.file()}{' is not there' * (found == 'off')}"
    answer(json, {"state": found, "file": str(inherited.file())}, line)


app.command()(show)


@app.command()
def explain(
    op: Annotated[str | None, typer.Argument(metavar="OP", help="Name of an op, e.g. qr.")] = None,
    m: Annotated[int | None, typer.Option(metavar="N", min=1, help="Rows.")] = None,
    n: Annotated[int | None, typer.Option("--n", metavar="N", min=1, help="Columns, or points.")] = None,
    d: Annotated[int | None, typer.Option(metavar="N", min=1, help="Input dimensions of a kernel matrix.")] = None,
    rhs: Annotated[int | None, typer.Option(metavar="N", min=1, help="Right-hand sides.")] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", min=1, help="Matrices in the batch.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="NAME", help="float32 or float64 (default).")] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="KIND", help="Of the data (default: cpu).")] = None,
    grad: Annotated[str | None, typer.Option(metavar="WHICH", help=_GRAD)] = None,
    variant: Annotated[str | None, typer.Option(metavar="NAME", help=_VARIANT)] = None,
    json: Json = False,
) -> None:
    """Show which candidate would run, and why."""
    if op is None:
        known = ", ".join(o.name for o in calibration.chosen_ops(None))
        raise SettingsError(
            f"explain needs an op ({known}). A table of all decisions exists only within a process: "
            "call autokern.explain() at its end, or `autokern run --explain script.py`"
        )
    there = {*calibration.chosen_devices(None), *(trial.problem.device for trial in api.profile().trials)}
    if device is not None and device.partition(":")[0] not in there:
        raise SettingsError(f"device {device!r} was asked for; torch or the profile knows {', '.join(sorted(there))}")
    found = api.explain(op, m=m, n=n, d=d, rhs=rhs, batch=batch, dtype=dtype, device=device, grad=grad, variant=variant)
    if json:
        emit(found)
    else:
        for line in str(found).splitlines():
            indent = " " * (len(line) - len(line.lstrip()) + 2)
            typer.echo(legible("\n".join(textwrap.wrap(line, 80, subsequent_indent=indent))))


@app.command("doctor")
def examine(json: Json = False) -> None:
    """Check the parts of this machine, and report what works."""
    found = doctor.examine()
    answer(json, {"checks": found}, doctor.tabular(found))
    raise typer.Exit(int(any(finding.status == "problem" for finding in found)))


app.add_typer(profiles, name="profile", help="Take the measurements of this machine along as a file.")
profiles.command()(export)
app.command()(clear)
