"""Every test runs in an environment of its own: no settings of the user's, no profile of the machine's, stock hooks."""

from __future__ import annotations

import os

import pytest

from autokern import dispatch, hooks
from autokern.op import inside
from autokern.settings import Settings


def _bare(patch: pytest.MonkeyPatch, home: object) -> None:
    for name in list(os.environ):
        if name.startswith("AUTOKERN"):
            patch.delenv(name)
    patch.setenv("AUTOKERN_HOME", str(home))
    patch.setenv("AUTOKERN_CALIBRATE", "never")


@pytest.fixture(autouse=True, scope="session")
def _bare_environment(tmp_path_factory):
    """What fixtures of a wider scope than one test see."""
    with pytest.MonkeyPatch.context() as patch:
        _bare(patch, tmp_path_factory.mktemp("autokern"))
        yield


@pytest.fixture(autouse=True)
def _isolated(tmp_path, _bare_environment):
    """A fresh home and session before a test; the libraries' own functions after it, whatever it did."""
    with pytest.MonkeyPatch.context() as patch:
        _bare(patch, tmp_path / "autokern")
        dispatch.reset()
        yield
        while hooks._depth:
            hooks.disable()
        inside.active = False
    dispatch.reset(Settings(calibrate="never"))
