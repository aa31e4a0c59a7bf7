"""The command `autokern profile export`, and the commands of earlier versions, which say what to use in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from autokern.cli import tables
from autokern.cli.console import Json, app, emit, message
from autokern.core.errors import SettingsError
from autokern.runtime import api
from autokern.tuning import store

_ANY = {"allow_extra_args": True, "ignore_unknown_options": True}

profiles = typer.Typer(no_args_is_help=True)
app.add_typer(profiles, name="profile", help="Take the measurements of this machine along as a file.")


@profiles.command("export")
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    json: Json = False,
) -> None:
    """Write the profile in force as a file.

    AUTOKERN_PROFILE=FILE pins it, here or on another machine. No machine name, user name or path is in it. Nothing is
    sent anywhere.
    """
    profile = msgspec.structs.replace(api.profile(), tools={}, fruitless={})  # what was tried here may name paths
    if not profile.trials:
        message("nothing was measured on this machine as it is now; `autokern calibrate` measures it in 20 s")
        raise typer.Exit(1)
    store.write_file(file, profile)
    if json:
        emit({"file": str(file), "fingerprint": profile.fingerprint, "problems": len(profile.trials)})
        return
    tables.show(tables.note(f"wrote {tables.counted(len(profile.trials), 'problem')} to {file}", ""))


@profiles.command("import", hidden=True, context_settings=_ANY)
def import_files() -> None:
    """Removed: copy the file, and name the copy by AUTOKERN_PROFILE."""
    raise SettingsError("`profile import` was removed; copy the file, and name the copy by AUTOKERN_PROFILE=FILE")


@profiles.command("list", hidden=True, context_settings=_ANY)
def list_profiles() -> None:
    """Removed: `autokern show` names the file in force."""
    raise SettingsError("`profile list` was removed; `show` tells what was measured and names the file in force")


@app.command("record", hidden=True, context_settings=_ANY)
def record_program() -> None:
    """Removed: first use measures the problems at hand."""
    raise SettingsError(
        "`record` was removed; `run` measures the problems at hand at first use, and `calibrate` measures the machine"
    )
