"""The entry point of the command line: `autokern run` is light, every other command is in `commands`."""

from __future__ import annotations

import sys

from autokern.cli import run
from autokern.core.errors import AutokernError

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process; return its exit status: 0 fine, 1 a finding, 2 a usage error."""
    if sys.argv[1:2] == ["run"]:
        try:
            order = run.parse(sys.argv[2:])
            if order is not None:
                return run.execute(order)
        except AutokernError as error:
            print(f"autokern: {error}", file=sys.stderr)
            return 2
    from autokern.cli.commands import app  # only now: a program under `autokern run` imports neither typer nor rich

    app(prog_name="autokern")
    return 0
