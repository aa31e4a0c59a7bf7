"""Programs run and end as under python; help and versions import no library, and no program sees half a package."""

import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from support.programs import QUIET, python
from typer.models import OptionInfo
from typer.testing import CliRunner

import autokern
from autokern.cli import app as runner
from autokern.cli.app import Order
from autokern.cli.commands import app
from autokern.core.errors import SettingsError
from autokern.system import start

PROGRAM = """
import sys
import helper
import torch, gpytorch
x = torch.rand(30, 2)
gpytorch.kernels.RBFKernel()(x).to_dense()
print(sys.argv, sys.path[0], __name__, __file__)
print(sorted({m for m in sys.modules if m in ("rich", "typer")}))
if "fail" in sys.argv:
    raise ZeroDivisionError("on purpose")
sys.exit(7)
"""


@pytest.fixture
def program(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "script.py").write_text(PROGRAM)
    (folder / "helper.py").write_text("")
    return folder


def test_run_is_like_python(program, tmp_path):
    ours = python("-m", "autokern", "run", "elsewhere/script.py", "--stats", "fail", cwd=tmp_path)
    assert ours.returncode == 1
    path = str(program / "script.py")
    told = [str(["elsewhere/script.py", "--stats", "fail"]), str(program), "__main__", path]
    assert ours.stdout.splitlines() == [" ".join(told), "[]"]
    trace = ours.stderr.splitlines()
    assert trace[:2] == ["Traceback (most recent call last):", f'  File "{path}", line 10, in <module>']
    assert trace[-1] == "ZeroDivisionError: on purpose"


@pytest.mark.slow
def test_run_a_module_from_the_working_directory_and_count_its_calls(program):
    ours = python("-m", "autokern", "run", "--explain", "-m", "script", "--stats", cwd=program)
    assert ours.returncode == 7
    assert str([str(program / "script.py"), "--stats"]) in ours.stdout
    for told in ("kernel_matrix", "what ran, on what, and why"):
        assert told in ours.stderr


HTML = Path.cwd() / "a.html"


@pytest.mark.parametrize(
    ("words", "order"),
    [
        ("--explain s.py -m", Order("s.py", ["-m"], decisions=True)),
        ("-m pytest --stats", Order("pytest", ["--stats"], module=True)),
        ("-mpytest", Order("pytest", [], module=True)),
        ("-- --odd.py", Order("--odd.py", [])),
        ("--profile -c 1 --stats", Order("-c", ["1", "--stats"], lines=True)),
        ("--explain --report a.html -m pkg --report b", Order("pkg", ["--report", "b"], True, True, report=HTML)),
        ("- a", Order("-", ["a"])),
        ("--help", None),
    ],
)
def test_run_leaves_options_behind_the_program_to_it(words, order):
    assert runner.parse(words.split()) == order


@pytest.mark.parametrize("word", ["-m", "-c", "-x"])
def test_an_option_without_its_value_is_refused(word):
    with pytest.raises(SettingsError, match="-m and a module"):
        runner.parse([word])


FAILS = "import sys; print(sys.argv, repr(sys.path[0]), __name__); sys.stdout.flush(); 1 / 0"


@pytest.mark.slow
@pytest.mark.parametrize(("words", "text"), [(["-c", FAILS, "a"], ""), (["-", "a"], FAILS)])
def test_code_runs_as_under_python(words, text):
    stock, ours = (python(*way, *words, input=text) for way in ([], [*QUIET, "-m", "autokern", "run"]))
    assert (stock.stdout, stock.stderr, stock.returncode) == (ours.stdout, ours.stderr, 1)


PROFILED = """
import time, torch, gpytorch
points = torch.rand(50, 2, dtype=torch.float64)
def matrix(kernel):
    began = time.perf_counter()
    while time.perf_counter() < began + 0.4:
        kernel(points).to_dense()  # the kernel
class Own(gpytorch.kernels.RBFKernel): pass
matrix(gpytorch.kernels.RBFKernel())
time.sleep(0.4)  # the sleep
"""


@pytest.mark.slow
def test_the_seconds_of_a_program_are_told_by_its_lines(tmp_path):
    (tmp_path / "program.py").write_text(PROFILED)
    orders = {"AUTOKERN_FORCE": "kernel_matrix=gemm", "COLUMNS": "80"}
    run = python(*QUIET, "-m", "autokern", "run", "--profile", "program.py", cwd=tmp_path, **orders)
    lines = run.stderr.splitlines()
    assert max(map(len, lines)) <= 80, run.stderr
    kernel, sleep = (line.split() for end in (":7 ", ":10 ") for line in lines if f"program.py{end}" in line)
    assert 0.2 < float(kernel[0]) < 1.0
    assert float(kernel[1]) > 0.1, "autokern's part"
    assert sleep[0] == sleep[1], "by nobody known"
    assert 0.3 < float(sleep[0]) < 0.8


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
