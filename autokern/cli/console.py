"""The command line's application, and the messages, JSON output and exit statuses that all commands share."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated, Any

import msgspec
import typer
from typer.core import TyperGroup

from autokern.core.errors import AutokernError, AutokernWarning
from autokern.core.units import legible

SCHEMA = 2
"""Version of the JSON documents: within one version fields may be added, but no field is removed or changes meaning."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


class _Commands(TyperGroup):
    """Prints every error of autokern as one message, and its warnings without source lines."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command of a context."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", AutokernWarning)
            usual, tell = warnings.showwarning, message

            def shown(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
                if issubclass(category, AutokernWarning):
                    tell(str(message))
                else:
                    usual(message, category, *place, **more)

            warnings.showwarning = shown
            try:
                return super().invoke(ctx)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(0) from None
            except KeyboardInterrupt:
                raise typer.Exit(130) from None
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


def message(text: str) -> None:
    """Print a line for people on standard error."""
    typer.echo(legible(f"autokern: {text}", sys.stderr), err=True)


def emit(value: object, name: str = "rows") -> None:
    """Print a value as a JSON document; a list is stored under `name`."""
    typer.echo(document(value, name))


def document(value: object, name: str = "rows") -> bytes:
    """Return a value as indented JSON with all fields, defaults included, and the version of the document."""
    plain = _plain(value)
    body = plain if isinstance(plain, dict) else {name: plain}
    return msgspec.json.format(msgspec.json.encode({"schema": SCHEMA, **body}), indent=2)


def _plain(value: Any) -> Any:
    """Return a value as dicts and lists with all fields, since msgspec omits a profile's defaults."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [_plain(item) for item in value]
    return value
