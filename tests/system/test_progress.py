"""progress.py: a bar on a terminal, which leaves room for the bar whatever is measured; nothing elsewhere."""

from __future__ import annotations

import io
import re
import sys

import pytest

from autokern.core.output import display


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
def test_without_a_terminal_one_line_is_shown(monkeypatch, show):
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    with display("measuring", show) as progress:
        assert shown.getvalue() == "measuring\n" * show, "before the pause"
        progress(0.5, "x")
    assert shown.getvalue() == "measuring\n" * show


def test_without_standard_error_nothing_is_shown(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with display("measuring") as progress:
        progress(0.5, "x")
