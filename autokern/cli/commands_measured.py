"""The commands on measurements (`calibrate`, `show`, `profile export`, `clear`), and the output of all commands."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from autokern.cli import doctor, report, summary, tables
from autokern.core import registry
from autokern.core.errors import AutokernError, SettingsError
from autokern.core.output import duration, legible
from autokern.evaluation import calibrate as evaluation
from autokern.runtime import api, dispatch
from autokern.system import load
from autokern.system.files import write_whole
from autokern.tuning import store
from autokern.tuning.profile import Profile

SCHEMA = 2  # of JSON documents: within one version fields may be added, but none is removed or changes meaning

_BUDGET = {"quick": 20.0, "full": 300.0}
_ACCURACY = "approximate: also candidates of lower precision."
_OUTPUT = "Also write JSON to this file."
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def message(text: str) -> None:
    """Print a line for people on standard error."""
    typer.echo(legible(f"autokern: {text}", sys.stderr), err=True)


def emit(value: msgspec.Struct | dict[str, Any]) -> None:
    """Print a value as a JSON document: its version, and all fields, defaults included."""
    typer.echo(msgspec.json.format(msgspec.json.encode({"schema": SCHEMA, **_plain(value)}), indent=2))


def answer(json: bool, value: msgspec.Struct | dict[str, Any], *parts: tables.Table | str) -> None:
    """Print a value as JSON, or else tables and lines."""
    if json:
        emit(value)
    else:
        tables.show(*parts)


def _plain(value: Any) -> Any:
    """Return a value as dicts and lists with all fields, since msgspec omits a profile's defaults."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [*map(_plain, value)] if isinstance(value, tuple | list | set | frozenset) else value


def calibrate(
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes, few rounds (the default).")] = False,
    full: Annotated[bool, typer.Option("--full", help="Many sizes, also candidates that compile.")] = False,
    ops: Annotated[str | None, typer.Option(metavar="OP,...", help="Ops to measure (default: all).")] = None,
    device: Annotated[str | None, typer.Option(metavar="KIND", help="Where to measure (default: all).")] = None,
    budget: Annotated[float | None, typer.Option(metavar="S", help="Most seconds (20 quick, 300 full).")] = None,
    accuracy: Annotated[str | None, typer.Option(metavar="LEVEL", help=_ACCURACY)] = None,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help=_OUTPUT)] = None,
    json: Json = False,
) -> None:
    """Measure this machine and remember it."""
    if quick and full:
        raise SettingsError("--quick and --full were both asked for; choose one")
    level = "full" if full else "quick"
    seconds = _BUDGET[level] if budget is None else budget
    names = None if ops is None else [name.strip() for name in ops.split(",") if name.strip()]
    if names == []:
        raise SettingsError("an empty list of ops was given; name some, or leave --ops out for all")
    settings = dispatch.session().settings
    if settings.profile is not None:
        raise SettingsError(f"AUTOKERN_PROFILE pins {settings.profile}, which is never written; unset it to measure")
    if output is None and (obstacle := doctor.folder_obstacle(settings)) is not None:
        advice = "Set AUTOKERN_HOME to a private folder that can be written, or give --output FILE"
        raise AutokernError(f"asked to keep measurements in {store.home(settings)}; found: {obstacle}. {advice}")
    if output is not None:
        write_whole(output, None)
    before, interrupted = api.profile(), False
    if (busy := load.look()).crowded():
        message(f"{busy}; measuring with what is free: what is disturbed too much is not kept")
    began, watch = time.perf_counter(), load.Watch()
    try:
        profile = evaluation.calibrate(names, level, seconds, device, accuracy=accuracy)
    except KeyboardInterrupt:
        profile, interrupted = api.profile(), True
    took = time.perf_counter() - began
    if output is not None:
        store.write_file(output, profile)
    found = summary.known(profile, names)
    new = len(profile.trials) - len(before.trials)
    title = f"{new} problems measured in {took:.0f} s, {len(profile.trials)} known in all"
    answer(json, msgspec.structs.replace(found, winners=[]), *tables.of_known(found, title))
    if interrupted:
        message(f"interrupted after {took:.0f} s; the profile of before stays in force")
        raise typer.Exit(130)
    judgement, trusted = verdict(before, profile, names, watch.reading())
    if judgement:
        message(judgement)
    if not trusted:
        raise typer.Exit(1)
    if not found.ops:
        asked = "any op" if names is None else ", ".join(names)
        lacking = f"unless no problem of {asked} has more than one candidate on this machine"
        raise SettingsError(f"nothing could be measured within {seconds:g} s: allow more with --budget, {lacking}")


def verdict(before: Profile, after: Profile, ops: Collection[str] | None, found: load.Load) -> tuple[str, bool]:
    """Judge a calibration by the load during it: a message, empty if the machine was quiet, and whether to trust it."""
    if not found.crowded():
        return "", True
    known = {trial.problem: trial for trial in before.trials}
    own = [trial for trial in after.trials if ops is None or trial.problem.op in ops]
    new = [trial for trial in own if trial != known.get(trial.problem)]
    told = f"meanwhile {found}: {len(new)} problems measured, {sum(t.disturbed for t in new)} disturbed; "
    told += "`autokern calibrate` measures again when the machine is quiet"
    trusted = bool(own) and not doctor.is_disturbed(new or own)
    return told if trusted else f"nothing trustworthy was measured: {told}", trusted


def show(
    op: Annotated[str | None, typer.Argument(metavar="OP", help="Show every measured problem of this op.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page to this file.")] = None,
    json: Json = False,
) -> None:
    """Show which candidate is fastest from which size on."""
    if html is not None:
        write_whole(html, None)
    settings = dispatch.session().settings
    found = summary.known(api.profile(), None if op is None else [registry.get(op).name])
    if op is not None:
        choices = summary.thresholds(registry.get(op), dispatch.session().chooser, settings)
        found = msgspec.structs.replace(found, thresholds=choices)
    if not found.ops:
        answer(json, found)
        advice = "`autokern calibrate` measures it in 20 s"
        if store.leaves_aside(settings):
            advice = "AUTOKERN_DETERMINISTIC=1 leaves aside what was measured; unset it, or pin a profile"
        elif settings.profile is not None:
            advice = f"the file of AUTOKERN_PROFILE does not hold it; unset that, and {advice}"
        message(f"nothing{f' of {op}' if op else ''} was measured on this machine as it is now; {advice}")
        raise typer.Exit(1)
    title = "fastest candidates; sizes are of single matrices without gradients, counts of problems"
    choices_by_size = [tables.thresholds(found.thresholds)] if found.thresholds else []
    shown = [*tables.winners(found.winners), *choices_by_size, *tables.of_known(found, title)]
    when = f"last measured {found.created.replace('T', ' ').replace('Z', ' UTC')}"
    if html is not None:
        report.write(html, report.of_profile(api.profile(), shown, when, op))
    lines = [f"{name} needs {duration(seconds)} before its first call" for name, seconds in found.setup.items()]
    answer(json, found, *shown, *lines, f"{when}, {store.origin(settings, found.fingerprint)}")


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    json: Json = False,
) -> None:
    """Write the profile in force as a file.

    AUTOKERN_PROFILE=FILE pins it, here or on another machine. No machine name, user name or path is in it. Nothing is
    sent anywhere.
    """
    profile = msgspec.structs.replace(api.profile(), fruitless={})
    if not profile.trials:
        message("nothing was measured on this machine as it is now; `autokern calibrate` measures it in 20 s")
        raise typer.Exit(1)
    store.write_file(file, profile)
    value = {"file": str(file), "fingerprint": profile.fingerprint, "problems": len(profile.trials)}
    answer(json, value, f"wrote {tables.counted(len(profile.trials), 'problem')} to {file}")


def clear(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask on a terminal.")] = False, json: Json = False
) -> None:
    """Remove all measurements."""
    settings = dispatch.session().settings
    if not yes and sys.stdin.isatty():
        typer.confirm(f"remove all measurements in {store.home(settings)}?", abort=True)
    gone = store.clear(settings)
    lines = [f"nothing to remove: no profile in {store.home(settings)}"]
    if gone:
        lines = [f"removed {tables.counted(len(gone), 'file')} from {gone[0].parent}:", *(f"  {p.name}" for p in gone)]
    answer(json, {"removed": [str(path) for path in gone]}, *lines)
    dispatch.reset()
