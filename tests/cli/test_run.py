"""`autokern run`: programs run and end as under python, options behind them are theirs, and their lines are timed."""

from pathlib import Path

import pytest
from support.programs import QUIET, python

from autokern.cli import app as runner
from autokern.cli.app import Order
from autokern.core.errors import SettingsError

SCRIPT = """
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
    (folder / "script.py").write_text(SCRIPT)
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


TOLD = "import sys; print(sys.argv, repr(sys.path[0]), __name__); sys.stdout.flush(); 1 / 0"


@pytest.mark.slow
@pytest.mark.parametrize(("words", "text"), [(["-c", TOLD, "a"], ""), (["-", "a"], TOLD)])
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
