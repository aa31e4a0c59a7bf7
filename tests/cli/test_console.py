"""What commands print, character by character, and how they end: ``console.txt`` has what a user sees."""

import doctest
import io
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.programs import python

import autokern
from autokern.cli import app
from autokern.core.decision import Cost, Decision
from autokern.core.problem import Problem
from autokern.runtime import dispatch
from autokern.system import host
from autokern.tuning import store

COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ |#).*\n)*)", re.MULTILINE)
EMPTY, KEPT = Path(__file__).with_name("console.txt").read_text(encoding="utf-8").split("# Measured\n")
RECORDED = [(False, *found) for found in COMMAND.findall(EMPTY)] + [(True, *found) for found in COMMAND.findall(KEPT)]


@pytest.mark.parametrize(("kept", "line", "expected"), RECORDED, ids=[line for _, line, _ in RECORDED])
def test_a_command_prints_what_is_recorded(kept, line, expected, profile, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("autokern.evaluation.calibrate.display", lambda *args: pytest.fail("it measures"))
    if kept:
        store.save(dispatch.session().settings, profile)
        store.write_file(tmp_path / "pinned.json", profile)
    variables, _, words = line.replace("TMP", str(tmp_path)).partition("autokern")
    for variable in ("COLUMNS=80", *variables.split()):
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.setattr(sys, "argv", ["autokern", *shlex.split(words)])
    monkeypatch.setattr(dispatch, "_session", None)  # as in a new process
    try:
        status = app.main()
    except SystemExit as ended:
        status = ended.code
    out, errors = capsys.readouterr()
    told = out + textwrap.indent(errors, "! ") + f"[{status}]\n" * bool(status)
    told = told.replace(str(tmp_path), "TMP").replace(host.current().fingerprint, "FINGERPRINT")
    told = re.sub(r" *\n\s*\n| +\n", "\n", told)
    assert doctest.OutputChecker().check_output(expected.replace("\n\n", "\n"), told, doctest.ELLIPSIS), told
    assert not autokern.is_enabled()


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("words", ["show", "show kernel_matrix", "explain kernel_matrix --n 400", "clear"])
def test_a_stream_of_plain_characters_gets_plain_characters(words):
    run = python("-m", "autokern", *words.split(), text=False, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert run.returncode == 0, run.stderr
    assert run.stdout.isascii()
    assert b"?" not in run.stdout


def test_decisions_print_where_standard_output_is_plain(monkeypatch):
    costs = {"stock": Cost(seconds=1e-6)}
    decision = Decision(problem=Problem(op="qr"), candidate="stock", reason="r", source="measured", costs=costs)
    assert "µs" in str(decision)
    monkeypatch.setattr(sys, "stdout", plain := io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    print(decision)
    print(autokern.Explanation([(decision, 3)]))
    plain.flush()
    assert b"1.00 us" in plain.buffer.getvalue()


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
def test_a_reader_that_stops_is_no_fault():
    command = f'{{ "{sys.executable}" -m autokern show kernel_matrix; echo "$?" >&2; }} | true'
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200, check=False)
    assert run.stderr.strip() == "0"
