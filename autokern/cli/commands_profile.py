"""Commands on profiles as files: `autokern profile export`, `import` and `list`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from autokern.cli import doctor, tables
from autokern.cli.console import Json, app, emit, message
from autokern.core.errors import AutokernError, ProfileError, SettingsError
from autokern.core.settings import Settings
from autokern.runtime import api, dispatch
from autokern.system import host
from autokern.tuning import calibration, kin, layers, sharing, store

_SHORT = 8
"""Digits of a fingerprint in tables."""
_FILLERS = re.compile(r"\((R|TM)\)| CPU\b| Processor$| \d+-Core| @.*")
"""Words in names of CPUs that tell nothing."""

profiles = typer.Typer(no_args_is_help=True)
app.add_typer(profiles, name="profile", help="Share measurements between machines as files.")


@profiles.command("export")
def export(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The file to write (default: standard output).")
    ] = None,
    ops: Annotated[str | None, typer.Option(metavar="OP,...", help="Ops to write (default: all).")] = None,
    json: Json = False,
) -> None:
    """Write the profile in force as a file.

    It is for others: no machine name, user name or path is in it. Nothing is sent anywhere.
    """
    names = None if ops is None else [name.strip() for name in ops.split(",") if name.strip()]
    if names == []:
        raise SettingsError("an empty list of ops was given; name some, or leave --ops out for all")
    chosen = None if names is None else {op.name for op in calibration.chosen_ops(names)}
    profile = sharing.shareable(api.profile(), chosen)
    if not profile.trials:
        what = "" if names is None else f" of {', '.join(names)}"
        message(f"nothing{what} was measured on this machine as it is now; `autokern calibrate` measures it in 20 s")
        raise typer.Exit(1)
    if file is None and _on_terminal():
        raise SettingsError("a profile has hundreds of kilobytes, too many for a terminal; name a FILE, or redirect it")
    if file is None:
        typer.echo(store.plain(profile), nl=False)
        return
    store.write_file(file, profile, compact=True)
    known = sorted({trial.problem.op for trial in profile.trials})
    if json:
        told = {"file": str(file), "fingerprint": profile.fingerprint, "ops": known, "problems": len(profile.trials)}
        emit({**told, "bytes": file.stat().st_size})
        return
    size = f"{file.stat().st_size / 1000:.0f} kB"
    words = f"wrote {_problems(len(profile.trials))} of {tables.counted(len(known), 'op')} to {file} ({size})"
    tables.show(tables.note(words, ""))


@profiles.command("import")
def import_files(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Files that `autokern profile export` wrote.")],
    json: Json = False,
) -> None:
    """Add measurements from files.

    Those of this machine's kind come into force, others serve as priors only.
    """
    settings, here = dispatch.session().settings, host.current()
    read = [(path, sharing.judged(path)) for path in files]  # all before the first is kept
    if (obstacle := doctor.folder_obstacle(settings)) is not None:
        raise AutokernError(
            f"asked to keep measurements in {store.home(settings)}; found: {obstacle}. "
            "Set AUTOKERN_HOME to a private folder that can be written"
        )
    found = [sharing.absorb(settings, profile, path, here.fingerprint) for path, profile in read]
    dispatch.reset()
    if json:
        emit(found, "imports")
    for (_, profile), result in zip(read, found, strict=True):
        if not json:
            tables.show(tables.note(_told(result, _likeness(here, profile.host)), ""))
    if settings.profile is not None:
        message("AUTOKERN_PROFILE is set: what was imported serves only where it is unset, or names that folder")


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _told(found: sharing.Import, alike: dict[str, float]) -> str:
    """Return in words what became of a file."""
    count = f"{found.file}: {_problems(found.problems)}, {found.new} new,"
    if found.own:
        return f"{count} measured on such a machine as this one:\nmerged into this machine's profile {found.kept_in}"
    serves = any(value >= kin.LEAST for value in alike.values())
    role = f"it serves as a prior only ({_alike(alike)})" if serves else "it is too unlike this one to serve"
    return f"{count} measured on another machine ({found.cpu or 'unknown'}):\nkept in {found.kept_in}; {role}"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A file that holds a profile, and its role.

    Parameters
    ----------
    file, fingerprint : str
        The file, and the host whose profile it holds.
    cpu, torch, accelerators : str, str, list of str
        The host in short.
    threads : int
        Its number of threads.
    problems : int
        Number of problems measured.
    created : str
        UTC date of the last measurement, ISO 8601.
    role : {"in force", "prior", "unused", "faulty"}
        Its part in decisions on this machine.
    likeness : dict of str to float
        Likeness to this machine, by kind of device.
    fault : str
        Why it cannot be used.
    """

    file: str
    fingerprint: str
    cpu: str = ""
    torch: str = ""
    accelerators: list[str] = []
    threads: int = 0
    problems: int = 0
    created: str = ""
    role: str = "unused"
    likeness: dict[str, float] = {}
    fault: str = ""


@profiles.command("list")
def list_profiles(json: Json = False) -> None:
    """List the profiles in the folder.

    It tells which one is in force, and which ones serve as priors.
    """
    settings = dispatch.session().settings
    found = _rows(settings)
    if json:
        emit(found, "profiles")
    elif found:
        columns = ("profile", "machine", ">problems", "measured", "used")
        tables.show(tables.table("profiles", columns, map(_cells, found)))
        faults = [f"{row.fingerprint[:_SHORT]}: {row.fault}" for row in found if row.fault]
        places = [f"{row.fingerprint[:_SHORT]:{_SHORT}}  {row.file}" for row in found]
        places = [f"kept in\n{store.home(settings)}"] if settings.profile is None else ["AUTOKERN_PROFILE:", *places]
        tables.show(*map(tables.note, [*faults, *places]))
    if not any(row.role == "in force" for row in found):
        message("no profile of this machine as it is now; `autokern calibrate` measures one in 20 s")
    if not found:
        raise typer.Exit(1)


def _rows(settings: Settings) -> list[Row]:
    here, alone = host.current(), layers.lone_file(settings)
    used = {
        profile.fingerprint
        for device in here.devices
        for profile, _ in kin.priors(settings, here.fields, here.fingerprint, device)
    }
    rows = []
    for file in layers.files(settings):
        try:
            profile = layers.whole(file)
        except (OSError, ProfileError) as error:
            if file.fingerprint:
                rows.append(Row(file=str(file.path), fingerprint=file.fingerprint, role="faulty", fault=str(error)))
            continue
        cpu, versions = (profile.host.get(name) for name in ("cpu", "versions"))
        gpus = profile.host.get("accelerators")
        own = alone is not None or (profile.fingerprint == here.fingerprint and not layers.leaves_aside(settings))
        row = Row(
            file=str(file.path),
            fingerprint=profile.fingerprint,
            cpu=str(_field(cpu, "model")),
            torch=str(_field(versions, "torch")),
            accelerators=[str(_field(gpu, "name")) for gpu in gpus] if isinstance(gpus, list) else [],
            threads=_field(cpu, "threads") if isinstance(_field(cpu, "threads"), int) else 0,
            problems=len(profile.trials),
            created=profile.created,
            role="in force" if own else "prior" if profile.fingerprint in used else "unused",
            likeness=_likeness(here, profile.host),
        )
        rows.append(row)
    order = ("in force", "prior", "unused", "faulty")
    return sorted(rows, key=lambda row: (order.index(row.role), -max(row.likeness.values(), default=0.0)))


def _field(section: Any, name: str) -> Any:
    return section.get(name, "") if isinstance(section, dict) else ""


def _likeness(here: host.Host, fields: dict[str, Any]) -> dict[str, float]:
    return {device: round(kin.likeness(here.fields, fields, device), 3) for device in here.devices}


def _alike(likeness: dict[str, float]) -> str:
    if len(likeness) == 1:
        return f"likeness {next(iter(likeness.values())):.2f}"
    return ", ".join(f"likeness {value:.2f} on {device}" for device, value in likeness.items())


def _problems(count: int) -> str:
    return tables.counted(count, "problem")


def _cells(row: Row) -> tuple[str, ...]:
    name = row.fingerprint[:_SHORT]
    if row.fault:
        return name, "", "", "", row.role
    machine = "\n".join(
        [
            *filter(None, [_FILLERS.sub("", row.cpu), *row.accelerators]),
            f"torch {row.torch}, {tables.counted(row.threads, 'thread')}",
        ]
    )
    used = f"{row.role}, {_alike(row.likeness)}" if row.role == "prior" else row.role
    return name, machine, str(row.problems), row.created[:10], used
