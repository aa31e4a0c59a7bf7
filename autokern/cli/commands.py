"""The commands of the command line, each a thin layer over a function of the package.

Every command prints tables for people or, with ``--json``, one JSON document on standard output; progress and errors
go to standard error. Exit status: 0 fine, 1 a finding, 2 a usage error, 130 interrupted.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer.core import TyperGroup

from autokern import __version__
from autokern.cli import bench, bench_tables, doctor, run, tables
from autokern.core.errors import AutokernError, AutokernWarning, SettingsError
from autokern.core.registry import get
from autokern.hooks.calibrate import calibrate as measure
from autokern.runtime import api, dispatch
from autokern.system import host
from autokern.system.progress import display
from autokern.tuning import store, summary
from autokern.tuning.calibration import chosen_devices, chosen_ops

_BUDGET = {"quick": 20.0, "full": 300.0}
_LONGEST = 86_400.0

_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
_Quick = Annotated[bool, typer.Option("--quick", help="Few sizes, few rounds (the default).")]
_Full = Annotated[bool, typer.Option("--full", help="Many sizes, also candidates that compile.")]
_Output = Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Also write JSON to this file.")]


class _Commands(TyperGroup):
    """Prints every error of autokern as one message, and warnings without the lines of code that raised them."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command of a context."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", AutokernWarning)
            usual = warnings.showwarning

            def shown(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
                if issubclass(category, AutokernWarning):
                    _message(str(message))
                else:
                    usual(message, category, *place, **more)

            warnings.showwarning = shown
            try:
                return super().invoke(ctx)
            except AutokernError as error:
                _message(str(error))
                raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    help="Measure this machine once, and let GPyTorch take the fastest path on every call.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _message(text: str) -> None:
    typer.echo(f"autokern: {text}", err=True)


def _indented(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def _level(quick: bool, full: bool) -> str:
    if quick and full:
        raise SettingsError("--quick and --full were both asked for; choose one")
    return "full" if full else "quick"


def _version(asked: bool) -> None:
    if asked:
        found, names = host.current().fields["versions"], ("torch", "gpytorch", "linear_operator")
        typer.echo(f"autokern {__version__} ({', '.join(f'{name} {found[name]}' for name in names)})")
        raise typer.Exit


_Version = typer.Option("--version", callback=_version, is_eager=True, help="Print versions and exit.")


@app.callback()
def _global(version: Annotated[bool, _Version] = False) -> None:
    pass


@app.command()
def calibrate(
    quick: _Quick = False,
    full: _Full = False,
    ops: Annotated[str | None, typer.Option(metavar="OP,...", help="Ops to measure (default: all).")] = None,
    device: Annotated[str | None, typer.Option(help="Device to measure on (default: all).")] = None,
    budget: Annotated[float | None, typer.Option(metavar="S", help="Most seconds (20 quick, 300 full).")] = None,
    accuracy: Annotated[str | None, typer.Option(help="approximate: also candidates of lower precision.")] = None,
    output: _Output = None,
    json: _Json = False,
) -> None:
    """Measure this machine and remember it."""
    level = _level(quick, full)
    seconds = _BUDGET[level] if budget is None else budget
    if not 0 < seconds <= _LONGEST:
        raise SettingsError(f"a budget of {seconds:g} s was asked for; give more than 0 and at most {_LONGEST:g} s")
    names = None if ops is None else [name.strip() for name in ops.split(",") if name.strip()]
    if names == []:
        raise SettingsError("an empty list of ops was given; name some, or leave --ops out for all")
    kinds = None if device is None else [device]
    chosen_ops(names), chosen_devices(kinds)
    settings = dispatch.session().settings
    if settings.profile is not None:
        raise SettingsError(f"AUTOKERN_PROFILE pins {settings.profile}, which is never written; unset it to measure")
    if output is None and (obstacle := doctor.folder_obstacle(settings)) is not None:
        raise AutokernError(
            f"asked to keep measurements in {store.home(settings)}; found: {obstacle}. "
            "Set AUTOKERN_HOME to a private folder that can be written, or give --output FILE"
        )
    before, interrupted = len(api.profile().trials), False
    began = time.perf_counter()
    try:
        profile = measure(names, level, seconds, kinds, accuracy=accuracy)
    except KeyboardInterrupt:
        profile, interrupted = api.profile(), True
    took = time.perf_counter() - began
    if output is not None:
        store.write_file(output, profile)
    found = summary.known(profile, names)
    if json:
        typer.echo(_indented(msgspec.structs.replace(found, winners=[])))
    else:
        new = len(profile.trials) - before
        _print_known(found, f"{new} problems measured in {took:.0f} s, {len(profile.trials)} known in all")
    if interrupted:
        _message(f"interrupted after {took:.0f} s; the measurements until then are kept")
        raise typer.Exit(130)
    if not found.ops:
        raise SettingsError(f"nothing could be measured within {seconds:g} s; allow more with --budget")


def _print_known(found: summary.Known, title: str) -> None:
    if found.ops:
        tables.show(tables.summaries(found.ops, title))
    if found.rough:
        tables.show(tables.rough(found.rough))
    if found.banned:
        tables.show(tables.bans(found.banned))


@app.command()
def show(
    op: Annotated[str | None, typer.Argument(help="Show every measured problem of this op.")] = None,
    json: _Json = False,
) -> None:
    """Show which candidate is fastest from which size on."""
    found = summary.known(api.profile(), None if op is None else [get(op).name])
    if json:
        typer.echo(_indented(found))
    if not found.ops:
        what = "" if op is None else f" of {op}"
        _message(f"nothing{what} was measured on this machine as it is now; `autokern calibrate` measures it in 20 s")
        raise typer.Exit(1)
    if json:
        return
    if found.winners:
        tables.show(tables.winners(found.winners))
    _print_known(found, "fastest candidates; sizes are those of single matrices without gradients")
    lines = [f"{name} needs {tables.duration(seconds)} before its first call" for name, seconds in found.setup.items()]
    settings = dispatch.session().settings
    where = settings.profile or store.home(settings)
    place = where if where is None or where.is_file() else where / f"{found.fingerprint}.json"
    when = found.created.replace("T", " ").replace("Z", " UTC")
    tables.show(*map(tables.note, [*lines, f"last measured {when}, kept in\n{place}"]))


@app.command()
def explain(
    op: Annotated[str | None, typer.Argument(help="Name of an op, e.g. qr.")] = None,
    m: Annotated[int | None, typer.Option(min=1, help="Rows.")] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Columns, or points.")] = None,
    d: Annotated[int | None, typer.Option(min=1, help="Input dimensions of a kernel matrix.")] = None,
    rhs: Annotated[int | None, typer.Option(min=1, help="Right-hand sides.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Matrices in the batch.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64 (default).")] = None,
    device: Annotated[str | None, typer.Option(help="Device of the data (default: cpu).")] = None,
    grad: Annotated[str | None, typer.Option(help="Gradients wanted: a; of a kernel matrix theta, x, theta/x.")] = None,
    variant: Annotated[str | None, typer.Option(help="E.g. rbf/same/ard, matern52/cross/iso, lower.")] = None,
    json: _Json = False,
) -> None:
    """Show which candidate would run, and why."""
    if op is None:
        known = ", ".join(o.name for o in chosen_ops(None))
        raise SettingsError(
            f"explain needs an op ({known}). A table of all decisions exists only within a process: "
            "call autokern.explain() at its end, or `autokern run --explain script.py`"
        )
    _check_words(op, device, {"grad": grad, "variant": variant})
    sizes = {"m": m, "n": n, "d": d, "rhs": rhs, "batch": batch}
    words = {"dtype": dtype, "device": device, "grad": grad, "variant": variant}
    decision = api.explain(op, **{k: v for k, v in {**sizes, **words}.items() if v is not None})
    typer.echo(_indented(decision) if json else str(decision))


def _check_words(op: str, device: str | None, words: dict[str, str | None]) -> None:
    """Raise SettingsError for a device unknown to torch and the profile, or a word that no problem of the op has."""
    there = {*chosen_devices(None), *(trial.problem.device for trial in api.profile().trials)}
    if device is not None and device.partition(":")[0] not in there:
        raise SettingsError(f"device {device!r} was asked for; torch or the profile knows {', '.join(sorted(there))}")
    grid = get(op).grid("full", "float64", "cpu")
    for field, text in words.items():
        usual = sorted({word for problem in grid for word in getattr(problem, field).split("/") if word})
        for word in (text or "").split("/"):
            if word not in (*usual, "", "x"):
                raise SettingsError(f"{field} {word!r} was asked for; {op} knows {', '.join(usual) or 'none'}")


@app.command("doctor")
def examine(
    quick: Annotated[bool, typer.Option("--quick", help="Leave out candidates that compile.")] = False,
    json: _Json = False,
) -> None:
    """Try the parts of this machine, and report what works."""
    with display("autokern examines this machine") as progress:
        found = doctor.examine(quick, progress)
    if json:
        typer.echo(_indented(found))
    else:
        tables.show(tables.findings(found))
    raise typer.Exit(int(any(finding.status == "problem" for finding in found)))


@app.command(
    "run",
    options_metavar="[OPTIONS] SCRIPT | -m MODULE [ARGS]...",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def run_program(
    context: typer.Context,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module, as python does.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="At the end, count calls by op and candidate.")] = False,
    decisions: Annotated[bool, typer.Option("--explain", help="At the end, list the decisions taken.")] = False,
) -> None:
    """Run a script or module with autokern enabled, otherwise just as python would run it.

    Options of autokern come before the script or module; everything after that belongs to the program.

    Processes that it forks are served too; those that it spawns are not.
    """
    flags = ["--stats"] * stats + ["--explain"] * decisions + (["-m", module] if module else [])
    order = run.parse([*flags, *context.args])
    raise typer.Exit(0 if order is None else run.execute(order))


@app.command("bench")
def benchmark(quick: _Quick = False, full: _Full = False, output: _Output = None, json: _Json = False) -> None:
    """Measure what autokern is worth on this machine."""
    level = _level(quick, full)
    if not dispatch.session().settings.enabled:
        raise SettingsError("AUTOKERN=0 leaves nothing to compare with stock; unset it")
    if not api.profile().trials:
        _message("nothing was measured here yet: measuring first, for 20 s")
        measure(budget=_BUDGET["quick"])
    found = bench.everything(level == "full", (lambda part: None) if json else bench_tables.show)
    if output is not None:
        try:
            output.write_bytes(_indented(found) + b"\n")
        except OSError as error:
            raise AutokernError(f"asked to write {output}; found: {error.strerror}. Name another file") from None
    if json:
        typer.echo(_indented(found))
    wrong = sum(not cell.agrees for cell in found.kernel_matrices)
    if wrong:
        _message(f"{tables.counted(wrong, 'result')} of kernel_matrix differ from stock: see the table")
    raise typer.Exit(1 if wrong else 0)


@app.command()
def clear(json: _Json = False) -> None:
    """Remove all measurements."""
    settings = dispatch.session().settings
    gone = store.clear(msgspec.structs.replace(settings, strict=True))
    if json:
        typer.echo(_indented({"removed": [str(path) for path in gone]}))
    elif gone:
        title = tables.note(f"removed {tables.counted(len(gone), 'file')} from {gone[0].parent}:", "")
        tables.show(title, *(tables.note(f"  {path.name}") for path in gone))
    else:
        tables.show(tables.note(f"nothing to remove: no profile in {store.home(settings)}", ""))
    dispatch.reset()
