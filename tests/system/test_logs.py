"""Records on standard error by AUTOKERN_LOG, and a bar on a terminal; what a program sets on the logger stays."""

import io
import logging
import re
import sys

import pytest

import autokern
from autokern.core.output import display
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


TITLES = ("autokern measures this machine", "autokern measures kernel_matrix (float64, cpu) once, for 10 s at most")


@pytest.mark.parametrize("title", TITLES)
@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_a_long_text_leaves_room_for_the_bar(monkeypatch, columns, title):
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with display(title) as progress:
        for done in (0.0, 0.5, 1.0):
            progress(done, "kernel_matrix(m=1234, n=1234, d=30, rhs=2, float64, cpu, matern52/same/ard, grad=theta)")
    told = [line for line in re.split(r"[\r\n]+", shown.getvalue()) if "autokern" in line]
    assert told
    for line in told:
        assert line.count("━") + line.count("╸") + line.count("╺") == 20, "the whole bar is there"
        assert len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) <= columns
    assert columns < 80 or title != TITLES[0] or any("kernel_matrix" in line for line in told)


@pytest.mark.parametrize("show", [True, False])
def test_without_a_terminal_one_line_is_shown_and_without_standard_error_nothing(monkeypatch, show):
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    with display("measuring", show) as progress:
        assert shown.getvalue() == "measuring\n" * show, "before the pause"
        progress(0.5, "x")
    assert shown.getvalue() == "measuring\n" * show
    monkeypatch.setattr(sys, "stderr", None)
    with display("measuring", show) as progress:
        progress(0.5, "x")
