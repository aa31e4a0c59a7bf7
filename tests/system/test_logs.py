"""logs.py: AUTOKERN_LOG shows records on standard error, and what a program sets on the logger stays."""

from __future__ import annotations

import logging

import pytest

import autokern
from autokern.core.settings import Settings
from autokern.runtime import dispatch

log = logging.getLogger("autokern")


@pytest.fixture(autouse=True)
def _logger_as_before():
    before = log.level, log.handlers[:]
    yield
    log.level, log.handlers[:] = before


@pytest.mark.parametrize(("level", "decided"), [("debug", True), ("info", False)])
def test_what_is_asked_for_is_shown(capfd, level, decided):
    dispatch.reset(Settings(calibrate="never", log=level))
    autokern.linalg.cholesky(autokern.linalg.torch.eye(3))
    log.info("hello %s", "there")
    told = capfd.readouterr().err
    assert "autokern: info: hello there\n" in told
    assert ("cholesky(m=3" in told) == decided


@pytest.mark.parametrize("propagates", [True, False])
def test_a_handler_of_the_programs_own_gets_the_records_alone(capfd, monkeypatch, propagates):
    monkeypatch.setattr(log, "propagate", propagates)
    dispatch.reset(Settings(calibrate="never", log="info"))
    heard = []

    class Own(logging.Handler):
        def emit(self, record):
            heard.append(record.getMessage())

    log.addHandler(Own())
    log.info("hello")
    assert (heard, capfd.readouterr().err) == (["hello"], "")


def test_the_level_that_the_program_sets_stays():
    log.setLevel(logging.ERROR)
    dispatch.reset(Settings(calibrate="never"))
    assert (log.level, len(log.handlers)) == (logging.ERROR, 0)
    dispatch.reset(Settings(calibrate="never", log="debug"))
    assert log.level == logging.DEBUG
    log.setLevel(logging.ERROR)
    dispatch.reset(Settings(calibrate="never"))
    assert log.level == logging.ERROR
