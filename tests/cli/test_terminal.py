"""What is printed fits narrow terminals and plain character sets, and what reads it may stop."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
from support.programs import python
from typer.testing import CliRunner

import autokern
from autokern.cli.commands import app
from autokern.core.decision import Cost, Decision
from autokern.core.problem import Problem
from autokern.runtime import dispatch
from autokern.system import host
from autokern.tuning import store
from autokern.tuning.profile import Ban, Profile, Timing, Trial


def _profile() -> Profile:
    here = host.current()
    trials = [
        Trial(
            Problem(op="kernel_matrix", m=n, n=n, d=8, variant="matern52/same/ard", grad=grad),
            {"stock": Timing(1e-5 * n), "tiled": Timing(1e-5 * n * ratio, ratio)},
        )
        for grad in ("", "theta")
        for n, ratio in ((10, 2.0), (50, 1.4), (200, 0.7), (400, 0.5))
    ]
    ban = Ban("cholesky", "huge-pages", "float32", "cpu", "error 3 times its bound on a matrix with a large condition")
    return Profile(host=here.fields, fingerprint=here.fingerprint, trials=trials, banned=[ban], created="2026-01-02")


@pytest.fixture
def measured():
    store.save(dispatch.session().settings, _profile())
    dispatch.reset()


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("command", [["show"], ["show", "kernel_matrix"]])
def test_tables_have_whole_words_at_every_width(monkeypatch, columns, command):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = CliRunner().invoke(app, command).output
    lines = [line for line in out.splitlines() if not re.search(r"/|, ", line)]  # paths are not broken up
    assert max(map(len, lines)) <= columns
    for word in ("tiled", "banned on this host", "condition")[: 1 if command[1:] else None]:
        assert word in " ".join(out.split())


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("words", ["show", "show kernel_matrix", "explain kernel_matrix --n 400", "clear"])
def test_a_stream_of_plain_characters_gets_plain_characters(words):
    run = python("-m", "autokern", *words.split(), text=False, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert run.returncode == 0, run.stderr
    assert run.stdout.isascii()
    assert b"?" not in run.stdout


def test_decisions_print_where_standard_output_is_plain(monkeypatch):
    decision = Decision(
        problem=Problem(op="qr"), candidate="stock", reason="r", source="measured", costs={"stock": Cost(seconds=1e-6)}
    )
    assert "µs" in str(decision)
    monkeypatch.setattr(sys, "stdout", plain := io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    print(decision)
    print(autokern.Explanation([(decision, 3)]))
    plain.flush()
    assert b"1.00 us" in plain.buffer.getvalue()


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
def test_a_reader_that_stops_is_no_fault():
    command = f'"{sys.executable}" -m autokern show kernel_matrix; echo "$?" >&2'
    run = subprocess.Popen(
        ["bash", "-c", f"{{ {command}; }} | true"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _, errors = run.communicate(timeout=200)
    assert errors.strip() == "0"


@pytest.mark.parametrize("command", ["calibrate", "show", "explain", "doctor", "run", "compare"])
def test_flags_take_no_value(monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    options = CliRunner().invoke(app, [command, "--help"]).output.partition("Options:")[2]
    assert "--" in options
    assert "<" not in options, "values have names, as N or FILE; no types of Python"
