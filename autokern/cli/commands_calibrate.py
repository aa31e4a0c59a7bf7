"""The command `calibrate`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from autokern.cli import doctor, summary, tables
from autokern.cli.console import Json, app, emit, message
from autokern.core.errors import AutokernError, SettingsError
from autokern.evaluation import calibrate as measuring
from autokern.runtime import api, dispatch
from autokern.system import load, threads
from autokern.system.files import write_whole
from autokern.tuning import calibration, drawing, store
from autokern.tuning.profile import Profile

_BUDGET = {"quick": 20.0, "full": 300.0}
_ACCURACY = "approximate: also candidates of lower precision."
_OUTPUT = "Also write JSON to this file."


def _removed(asked: bool | None) -> None:
    if asked is not None:
        message("`--wait`, `--no-wait` and `--thorough` were removed and are ignored: a calibration measures at once")


@app.command()
def calibrate(
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes, few rounds (the default).")] = False,
    full: Annotated[bool, typer.Option("--full", help="Many sizes, also candidates that compile.")] = False,
    ops: Annotated[str | None, typer.Option(metavar="OP,...", help="Ops to measure (default: all).")] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="KIND", help="Where to measure (default: all).")
    ] = None,
    budget: Annotated[float | None, typer.Option(metavar="S", help="Most seconds (20 quick, 300 full).")] = None,
    accuracy: Annotated[str | None, typer.Option(metavar="LEVEL", help=_ACCURACY)] = None,
    thorough: Annotated[bool | None, typer.Option("--thorough", hidden=True, callback=_removed)] = None,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help=_OUTPUT)] = None,
    wait: Annotated[bool | None, typer.Option(hidden=True, callback=_removed)] = None,
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
    kinds = None if device is None else [device]
    settings = dispatch.session().settings
    if settings.profile is not None:
        raise SettingsError(f"AUTOKERN_PROFILE pins {settings.profile}, which is never written; unset it to measure")
    if output is None and (obstacle := doctor.folder_obstacle(settings)) is not None:
        raise AutokernError(
            f"asked to keep measurements in {store.home(settings)}; found: {obstacle}. "
            "Set AUTOKERN_HOME to a private folder that can be written, or give --output FILE"
        )
    if output is not None:
        write_whole(output, None)
    before, interrupted = api.profile(), False
    if (busy := load.look()).crowded(threads.current()):
        message(f"{busy}; measuring with what is free: what is disturbed too much is not kept")
    began, watch = time.perf_counter(), load.Watch()
    try:
        profile = measuring.calibrate(names, level, seconds, kinds, accuracy=accuracy)
    except KeyboardInterrupt:
        profile, interrupted = api.profile(), True
    took = time.perf_counter() - began
    if output is not None:
        store.write_file(output, profile)
    found = summary.known(profile, names)
    if json:
        emit(msgspec.structs.replace(found, winners=[]))
    else:
        new = len(profile.trials) - len(before.trials)
        title = f"{new} problems measured in {took:.0f} s, {len(profile.trials)} known in all"
        tables.show(*tables.of_known(found, title))
    if interrupted:
        message(f"interrupted after {took:.0f} s; the profile of before stays in force")
        raise typer.Exit(130)
    judgement, trusted = verdict(before, profile, names, watch.reading())
    if judgement:
        message(judgement)
    if not trusted:
        raise typer.Exit(1)
    if not found.ops:
        raise SettingsError(_nothing(names, kinds, level, seconds))


def _nothing(names: list[str] | None, kinds: list[str] | None, level: str, seconds: float) -> str:
    """Return why a calibration of these ops on these devices measured nothing."""
    places = itertools.product(calibration.chosen_ops(names), calibration.DTYPES, calibration.chosen_devices(kinds))
    grids = ((op, problem) for op, dtype, device in places for problem in op.grid(level, dtype, device))
    if any(len(drawing.measurable(op, problem, level)) > 1 for op, problem in grids):
        return f"nothing could be measured within {seconds:g} s; allow more with --budget"
    asked = "any op" if names is None else ", ".join(names)
    return f"there is nothing to measure: no problem of {asked} has more than one candidate on this machine"


def verdict(before: Profile, after: Profile, ops: Collection[str] | None, found: load.Load) -> tuple[str, bool]:
    """Judge a calibration by the load during it; `before` and `after` are the profiles.

    Return a message to the user, empty if the machine was quiet, and whether the ops' measurements can be trusted.
    """
    if not found.crowded(threads.current()):
        return "", True
    known = {trial.problem: trial for trial in before.trials}
    own = [trial for trial in after.trials if ops is None or trial.problem.op in ops]
    new = [trial for trial in own if trial != known.get(trial.problem)]
    told = f"meanwhile {found}: {len(new)} problems measured, {sum(t.disturbed for t in new)} disturbed; "
    told += "`autokern calibrate` measures again when the machine is quiet"
    trusted = bool(own) and not doctor.is_disturbed(new or own)
    return told if trusted else f"nothing trustworthy was measured: {told}", trusted
