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
from autokern.cli import bench, doctor, run, tables
from autokern.core.errors import AutokernError, AutokernWarning, SettingsError
from autokern.core.op import get
from autokern.hooks.calibrate import calibrate as measure
from autokern.runtime import api, dispatch
from autokern.system import host
from autokern.system.progress import display
from autokern.tuning import store, summary
from autokern.tuning.calibration import chosen_devices, chosen_ops
from autokern.tuning.profile import Profile

__all__ = ["app"]

_BUDGET = {"quick": 20.0, "full": 300.0}
_LONGEST = 86_400.0

_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
_Quick = Annotated[bool, typer.Option("--quick", help="Few sizes, few rounds (the default).")]
_Full = Annotated[bool, typer.Option("--full", help="Many sizes, also candidates that compile.")]
_Output = Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Also write JSON to this file.")]


class _Commands(TyperGroup):
    """Reports every error of autokern as one message, and warnings without the lines of code that raised them."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", AutokernWarning)
            usual = warnings.showwarning

            def shown(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
                if issubclass(category, AutokernWarning):
                    _say(str(message))
                else:
                    usual(message, category, *place, **more)

            warnings.showwarning = shown
            try:
                return super().invoke(ctx)
            except AutokernError as error:
                _say(str(error))
                raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    help="Measure this machine once, and let GPyTorch take the fastest path on every call.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say(text: str) -> None:
    typer.echo(f"autokern: {text}", err=True)


def _print_json(value: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def _write(path: Path, value: object) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    except OSError as error:
        raise AutokernError(f"asked to write {path}; found: {error.strerror}. Name another file") from None


def _level(quick: bool, full: bool) -> str:
    if quick and full:
        raise SettingsError("--quick and --full were both asked for; choose one")
    return "full" if full else "quick"


def _names(text: str | None) -> list[str] | None:
    names = None if text is None else [name.strip() for name in text.split(",") if name.strip()]
    if names == []:
        raise SettingsError("an empty list of ops was given; name some, or leave --ops out for all")
    return names


def _version(asked: bool) -> None:
    if asked:
        versions = host.current().fields["versions"]
        libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "gpytorch", "linear_operator"))
        typer.echo(f"autokern {__version__} ({libraries})")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def calibrate(
    quick: _Quick = False,
    full: _Full = False,
    ops: Annotated[str | None, typer.Option(metavar="OP,...", help="Ops to measure (default: all).")] = None,
    device: Annotated[str | None, typer.Option(help="Device to measure on (default: all).")] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds that it may take (20 quick, 300 full).")
    ] = None,
    accuracy: Annotated[
        str | None, typer.Option(help="approximate: measure candidates of lower precision too, and their errors.")
    ] = None,
    output: _Output = None,
    json: _Json = False,
) -> None:
    """Measure this machine and remember it."""
    level = _level(quick, full)
    seconds = _BUDGET[level] if budget is None else budget
    if not 0 < seconds <= _LONGEST:
        raise SettingsError(f"a budget of {seconds:g} s was asked for; give more than 0 and at most {_LONGEST:g} s")
    names, kinds = _names(ops), None if device is None else [device]
    chosen_ops(names), chosen_devices(kinds)
    settings = dispatch.session().settings
    if settings.profile is not None:
        raise SettingsError(f"AUTOKERN_PROFILE pins {settings.profile}, which is never written; unset it to measure")
    obstacle = doctor.folder_obstacle(settings)
    if obstacle is not None and output is None:
        raise AutokernError(
            f"asked to keep measurements in {store.home(settings)}; found: {obstacle}. "
            "Set AUTOKERN_HOME to a private folder that can be written, or give --output FILE"
        )
    before, interrupted = api.profile(), False
    began = time.perf_counter()
    try:
        profile = measure(names, level, seconds, kinds, accuracy=accuracy)
    except KeyboardInterrupt:
        profile, interrupted = api.profile(), True
    took = time.perf_counter() - began
    if output is not None:
        store.write_file(output, profile)
    _tell_calibration(before, profile, names, took, json)
    if interrupted:
        _say(f"interrupted after {took:.0f} s; the measurements until then are kept")
        raise typer.Exit(130)
    if not summary.summaries(profile, names):
        raise SettingsError(f"nothing could be measured within {seconds:g} s; allow more with --budget")


def _tell_calibration(before: Profile, after: Profile, names: list[str] | None, took: float, json: bool) -> None:
    found = summary.known(after, names)
    if json:
        _print_json(msgspec.structs.replace(found, winners=[]))
        return
    new = len(after.trials) - len(before.trials)
    if found.ops:
        title = f"{new} problems measured in {took:.0f} s, {len(after.trials)} known in all"
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
    names = None if op is None else [get(op).name]
    profile, settings = api.profile(), dispatch.session().settings
    found = summary.known(profile, names)
    if json:
        _print_json(found)
    elif found.ops:
        _tell_known(found, settings.profile or store.home(settings))
    if not found.ops:
        what = "nothing" if op is None else f"nothing of {op}"
        _say(f"{what} was measured on this machine as it is now; `autokern calibrate` measures it in 20 s")
        raise typer.Exit(1)


def _tell_known(found: summary.Known, where: Path | None) -> None:
    if found.winners:
        tables.show(tables.winners(found.winners))
    tables.show(tables.summaries(found.ops, "fastest candidates; sizes are those of single matrices without gradients"))
    if found.rough:
        tables.show(tables.rough(found.rough))
    if found.banned:
        tables.show(tables.bans(found.banned))
    for name, seconds in found.setup.items():
        tables.show(tables.note(f"{name} needs {tables.duration(seconds)} before its first call"))
    place = where if where is None or where.is_file() else where / f"{found.fingerprint}.json"
    when = found.created.replace("T", " ").replace("Z", " UTC")
    tables.show(tables.note(f"last measured {when}, kept in\n{place}"))


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
    """Say which candidate would run, and why."""
    if op is None:
        known = ", ".join(o.name for o in chosen_ops(None))
        raise SettingsError(
            f"explain wants an op ({known}). A table of all decisions exists only within a process: "
            "call autokern.explain() at its end, or `autokern run --explain script.py`"
        )
    _check_words(op, device, {"grad": grad, "variant": variant})
    fields = {"m": m, "n": n, "d": d, "rhs": rhs, "batch": batch}
    words = {"dtype": dtype, "device": device, "grad": grad, "variant": variant}
    decision = api.explain(op, **{k: v for k, v in {**fields, **words}.items() if v is not None})
    if json:
        _print_json(decision)
    else:
        typer.echo(str(decision))


def _check_words(op: str, device: str | None, words: dict[str, str | None]) -> None:
    """Raise SettingsError for devices unknown to torch and the profile, and for words that no problem of the op has."""
    if device is not None:
        kind = device.partition(":")[0]
        there = {*chosen_devices(None), *(trial.problem.device for trial in api.profile().trials)}
        if kind not in there:
            raise SettingsError(
                f"device {device!r} was asked for; torch or the profile knows {', '.join(sorted(there))}"
            )
    grid = get(op).grid("full", "float64", "cpu")
    for field, text in words.items():
        usual = sorted({word for problem in grid for word in getattr(problem, field).split("/") if word})
        unknown = [word for word in (text or "").split("/") if word and word not in usual and word != "x"]
        if unknown:
            known = ", ".join(usual) or "none"
            raise SettingsError(f"{field} {unknown[0]!r} was asked for; {op} knows {known}")


@app.command("doctor")
def examine(
    quick: Annotated[bool, typer.Option("--quick", help="Leave out candidates that compile.")] = False,
    json: _Json = False,
) -> None:
    """Find out by trying what works on this machine."""
    with display("autokern examines this machine") as progress:
        found = doctor.examine(quick, progress)
    problems = sum(finding.status == "problem" for finding in found)
    if json:
        _print_json(found)
    else:
        notes = sum(finding.status == "note" for finding in found)
        tables.show(tables.findings(found))
        counts = [f"{len(found)} checks", _counted(problems, "problem"), _counted(notes, "note")]
        tables.show(tables.note(", ".join(counts), "red" if problems else "green"))
    raise typer.Exit(1 if problems else 0)


def _counted(count: int, word: str) -> str:
    return f"{count or 'no'} {word}{'' if count == 1 else 's'}"


@app.command(
    "run",
    help="Run a script or module with autokern enabled.\n\nOtherwise it runs just as python would run it. Options of "
    "autokern come before the script or module; everything after that belongs to the program. Processes that it forks "
    "are served too, those that it spawns are not.",
    options_metavar="[OPTIONS] SCRIPT | -m MODULE [ARGS]...",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def run_program(
    context: typer.Context,
    module: Annotated[
        str | None, typer.Option("-m", metavar="MODULE", help="Run a module, as `python -m` does.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="At the end, count calls by op and candidate.")] = False,
    decisions: Annotated[bool, typer.Option("--explain", help="At the end, list the decisions taken.")] = False,
) -> None:
    """Run a script or module with autokern enabled, otherwise just as python would run it."""
    target = ["-m", module] if module else []
    flags = [flag for flag, given in (("--stats", stats), ("--explain", decisions)) if given]
    order = run.parse([*flags, *target, *context.args])
    raise typer.Exit(0 if order is None else run.execute(order))


@app.command("bench")
def benchmark(quick: _Quick = False, full: _Full = False, output: _Output = None, json: _Json = False) -> None:
    """Measure what autokern is worth on this machine."""
    level = _level(quick, full)
    settings = dispatch.session().settings
    if not settings.enabled:
        raise SettingsError("AUTOKERN=0 leaves nothing to compare with stock; unset it")
    if not api.profile().trials:
        _say("nothing was measured here yet: measuring first, for 20 s")
        measure(budget=_BUDGET["quick"])
    found = bench.everything(level == "full", (lambda part: None) if json else _print_part)
    if output is not None:
        _write(output, found)
    if json:
        _print_json(found)
    wrong = [cell for cell in found.kernel_matrices if not cell.agrees]
    if wrong:
        _say(f"{_counted(len(wrong), 'result')} of kernel_matrix differ from stock: see the table")
    raise typer.Exit(1 if wrong else 0)


def _print_part(part: bench.Benchmark) -> None:
    """Print one part of a benchmark as soon as it is measured."""
    if part.kernel_matrices:
        tables.show(*tables.kernel_matrices(part.kernel_matrices))
    if part.regret:
        tables.show(*tables.verdicts(part.regret, part.problems))
    if part.workloads:
        tables.show(tables.workloads(part.workloads))


@app.command()
def clear(json: _Json = False) -> None:
    """Remove all measurements."""
    settings = dispatch.session().settings
    gone = store.clear(msgspec.structs.replace(settings, strict=True))
    if json:
        _print_json({"removed": [str(path) for path in gone]})
    elif gone:
        tables.show(tables.note(f"removed {_counted(len(gone), 'file')} from {gone[0].parent}:", ""))
        tables.show(*(tables.note(f"  {path.name}") for path in gone))
    else:
        tables.show(tables.note(f"nothing to remove: no profile in {store.home(settings)}", ""))
    dispatch.reset()
