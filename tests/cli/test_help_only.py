"""Help and versions are printed without importing the libraries; no program sees a package without its names."""

import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from support.programs import python
from typer.models import OptionInfo
from typer.testing import CliRunner

import autokern
from autokern.cli.commands import app
from autokern.system import start

SCRIPT = Path(sysconfig.get_path("scripts"), "autokern.exe" if os.name == "nt" else "autokern")
HEAVY = {"torch", "numpy", "scipy", "gpytorch", "linear_operator", "pykeops"}
ROOT = str(Path(autokern.__file__).parents[1])
TOLD = {"COLUMNS": "80", "PYTHONPROFILEIMPORTTIME": "1", "PYTHONPATH": ROOT}


@pytest.mark.parametrize("words", [["calibrate"], pytest.param(["run", "x.py"], marks=pytest.mark.slow)])
def test_an_interrupt_during_imports_shows_no_traceback(words, tmp_path):
    (tmp_path / "gpytorch.py").write_text("raise KeyboardInterrupt")
    for command, status, told in ((["-m", "autokern", *words], 130, 0), (["-c", "import autokern"], -2, 1)):
        run = python(*command, PYTHONPATH=os.pathsep.join([str(tmp_path), ROOT]))
        assert (run.returncode, run.stderr.count("Traceback")) == (status, told), run.stderr


def _imported(stderr: str) -> set[str]:
    return {line.rpartition("|")[2].strip() for line in stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize(
    "words",
    [
        [], ["-h"], ["--version"], ["calibrate", "--help"], ["explain", "-h"], ["run", "--help"],
        ["profile"], ["profile", "export", "--help"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_help_is_as_before_and_imports_no_library(words):
    found = python("-m", "autokern", *words, **TOLD)
    modules = _imported(found.stderr)
    assert "typer" in modules, "what was imported is known"
    assert not modules & HEAVY, "commands import modules, no names"
    expected = CliRunner().invoke(app, words, prog_name="autokern", terminal_width=78)
    said = found.stdout + "".join(line for line in found.stderr.splitlines(True) if not line.startswith("import time:"))
    # the version of a loaded torch has the build, as 2.11.0+cu130, which the metadata of PyPI's wheels leave out
    output = expected.output.replace(torch.__version__, metadata.version("torch"))
    assert (said.split(), found.returncode) == (output.split(), expected.exit_code)


@pytest.mark.skipif(not SCRIPT.is_file(), reason="the command is not installed")
def test_the_installed_command_imports_no_library_for_its_version():
    found = subprocess.run(
        [SCRIPT, "--version"], env={**os.environ, **TOLD}, capture_output=True, text=True, timeout=280, check=False
    )
    assert not _imported(found.stderr) & HEAVY
    assert found.stdout.startswith(f"autokern {autokern.__version__} (torch {metadata.version('torch')}, gpytorch ")
    assert found.stdout.count("\n") == 1


def test_options_have_the_names_of_their_parameters() -> None:
    """Typer 0.27.2 calls an option by its metavar where that is the parameter's name in capitals."""
    for command in app.registered_commands:
        for name, kind in get_type_hints(command.callback, include_extras=True).items():
            option = next((o for o in getattr(kind, "__metadata__", ()) if isinstance(o, OptionInfo)), None)
            if option is not None and (option.metavar or "").lower() == name:
                named = option.param_decls or isinstance(option.default, str)  # what typer takes the first name for
                assert named, f"{command.callback.__name__}: --{name}"


@pytest.mark.parametrize("command", ["calibrate", "show", "explain", "doctor", "run", "compare"])
def test_flags_take_no_value(monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    options = CliRunner().invoke(app, [command, "--help"]).output.partition("Options:")[2]
    assert "--" in options
    assert "<" not in options, "values have names, as N or FILE; no types of Python"


def _asked(monkeypatch: pytest.MonkeyPatch, argv: list[str], started_with: str) -> bool:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", started_with.split())
    return start.only_helps()


HELPS = (
    "", "--help", "-h show", "--version", "calibrate --help", "profile", "profile -h", "profile export --help",
)  # fmt: skip
RUNS = (
    "show", "show qr", "run train.py --help", "run train.py", "run -m module -h", "compare -- train.py --help",
    "profile export", "profile export --help.json", "profile export file --help", "--quick --help",
    "show qr --help",  # no harm, only slower
)  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), [(line, line in HELPS) for line in (*HELPS, *RUNS)])
def test_a_command_line_asks_for_help_where_nothing_else_can_run(monkeypatch, line, expected):
    words = line.split()
    assert _asked(monkeypatch, ["-m", *words], f"python -X dev -m autokern {line}") is expected
    assert _asked(monkeypatch, [str(SCRIPT), *words], f"python {SCRIPT} {line}") is expected


@pytest.mark.parametrize(
    ("argv", "started_with"),
    [
        (["-m", "--help"], "python -m autokern.auto --help"),
        (["-m", "--help"], "python -m mine --help"),
        (["/p/mine.py", "--help"], "python /p/mine.py --help"),
        (["/p/autokern", "--help"], "python /p/autokern --help"),  # somebody else's script
        ([str(SCRIPT), "--help"], "python mine.py"),  # a program that sets sys.argv
        ([str(SCRIPT), "--help"], "python mine.py --help"),
        (["-m", "--help"], "python -c autokern --help"),
        ([""], "python"),
        ([], "python"),
        ([], ""),
    ],
)
def test_programs_never_ask_for_help(monkeypatch, argv, started_with):
    assert not _asked(monkeypatch, argv, started_with)


def test_a_link_to_the_installed_command_is_the_command(monkeypatch, tmp_path):
    link = tmp_path / SCRIPT.name
    try:
        link.symlink_to(SCRIPT)
    except OSError as error:
        pytest.skip(f"no links: {error}")
    assert _asked(monkeypatch, [str(link), "-h"], f"python {link} -h")


@pytest.mark.slow
def test_a_prompt_after_it_finds_the_package_whole():
    code = "import autokern; print(autokern.calibrate.__name__)"
    found = python("-i", "-m", "autokern", "--version", input=code)
    assert found.stdout.rstrip().endswith("calibrate"), found.stdout + found.stderr


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell")
@pytest.mark.parametrize("command", [f"'{SCRIPT}'", f"'{sys.executable}' -m autokern"], ids=["script", "module"])
def test_closed_output_is_no_fault(command):
    words = ["sh", "-c", f"{command} --help >&-"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert (found.returncode, found.stderr) == (0, "")
