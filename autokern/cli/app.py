"""The entry point of the command line: `autokern run` starts without typer; all other commands are in `commands`."""

from __future__ import annotations

import sys

from autokern.cli import run
from autokern.core.errors import AutokernError


def main() -> int:
    """Run the command line of this process; return its exit status.

    0 is fine, 1 a finding, 2 a usage error, 130 an interrupt.
    """
    try:
        if sys.argv[1:2] == ["run"] and sys.argv[2:3] not in (["-h"], ["--help"]):
            status = run.started(sys.argv[2:])
            if status is not None:
                return status
        from autokern.cli.commands import app  # only now: a program under `run` imports neither typer nor rich

        app(prog_name="autokern")
    except (AutokernError, KeyboardInterrupt) as error:
        if run.has_begun():  # raised by the program, which ends as under python
            raise
        if isinstance(error, KeyboardInterrupt):
            return 130
        print(f"autokern: {error}", file=sys.stderr)
        return 2
    return 0
