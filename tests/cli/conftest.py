"""The command line, in this process."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from autokern.cli.commands import app
from autokern.runtime import dispatch


@pytest.fixture
def run():
    """Run a command as a new process would."""

    def invoke(*arguments: object):
        dispatch.reset()
        return CliRunner().invoke(app, [*map(str, arguments)], prog_name="autokern")

    return invoke
