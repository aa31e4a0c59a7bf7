"""compare.py: a program off and on in turn, its sentence and warnings; run.py: spawned processes are served."""

import json
import math
import os
import shutil
import subprocess
import sys
import time

import msgspec
import psutil
import pytest
from support.programs import python
from typer.testing import CliRunner

from autokern.cli import compare, inherited
from autokern.cli.app import Order
from autokern.cli.commands import app
from autokern.cli.compare import Comparison, Run, interval
from autokern.core.errors import AutokernError

GP = """
import sys, torch, gpytorch
gpytorch.kernels.RBFKernel()(torch.rand(30, 2)).to_dense()
"""
QUIET = "import sys\nprint('chatter')\n"


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "program.py").write_text(text)
        return str(tmp_path / "program.py")

    return write


@pytest.fixture
def timed(monkeypatch):
    """Let runs take what a test says, in seconds by side."""

    def by(off, on):
        clock = {False: iter(off), True: iter([on[0], *on])}
        told = []

        def run(order, on, explain=False):
            told.append(on)
            return Run(next(clock[on]), 1.0 if on else 2.0, 2**30), ""

        monkeypatch.setattr(compare, "_run", run)
        return told

    return by


ORDER = Order("train.py", [])


def test_sides_take_turns_until_the_difference_is_known(timed):
    told = timed([4.0] * 20, [2.0, 2.1, 1.9, 2.0] * 5)
    found = compare.compare(ORDER, 20, math.inf, lambda text: None)
    assert told == [True, False, True, True, False, False, True]  # the first is not counted
    assert found.known
    assert found.low < 2.0 < found.high
    assert str(found).startswith("autokern saves 2.00 s of 4.00 s: train.py runs 2.00 times as fast (")
    assert not [doubt for doubt in found.warnings if "meanwhile" not in doubt]
    told = timed([4.0] * 20, [2.0] * 20)
    assert compare.compare(ORDER, 20, math.inf, lambda text: None).known
    assert len(told) == 7, "three pairs are the least, however well they agree"
    told = timed([4.0, 8.0] * 10, [3.0, 5.0] * 10)
    assert not compare.compare(ORDER, 20, 0.0, lambda text: None).known
    assert len(told) == 3, "the budget is over"


@pytest.mark.parametrize(
    ("off", "on", "told"),
    [
        ([4.0, 8.0] * 2, [3.0, 5.0] * 2, "not known to 3 %"),
        ([4.0, 8.0] * 2, [4.0, 8.0] * 2, "times vary by"),
        ([0.3] * 4, [0.2] * 4, "less than a second"),
    ],
)
def test_doubts_are_told(timed, off, on, told):
    timed(off, on)
    found = compare.compare(ORDER, 4, math.inf, lambda text: None)
    assert any(told in doubt for doubt in found.warnings)


def compared(off: list[Run], on: list[Run], low=1.9, speedup=2.0, high=2.1) -> Comparison:
    known = {"low": low, "speedup": speedup, "high": high, "known": True, "warnings": []}
    return Comparison(program="a, b.py", off=off, on=on, **known)


@pytest.mark.parametrize(
    ("cpu", "known", "words"),
    [
        ((2.0, 1.0), {}, "autokern saves 1.00 s of 2.00 s: a, b.py runs 2.00 times as fast (1.90 to 2.10 with 95 % "
         "confidence, 3 runs each in turn), with 0.5 GiB less memory and 50 % less CPU time."),
        ((1.0, 1.5), {}, "50 % more CPU time"),
        ((1.0, 8.0), {}, "8.0 times the CPU time"),
        ((1.0, 1.001), {}, "as much CPU time"),
        ((0.01, 2.0), {}, "200.0 times the CPU time"),
        ((1.0, 1.0), {"low": 0.7, "speedup": 0.8, "high": 0.9}, "autokern costs 1.00 s of 2.00 s: a, b.py runs 0.80 "),
        ((1.0, 1.0), {"low": 0.9, "speedup": 1.0, "high": 1.1}, "No difference is known: a, b.py takes 2.00 s without "
         "autokern and 1.00 s with it (1.00 times as fast; 0.90 to 1.10 with 95 % confidence, 3 runs each in turn)."),
    ],
)  # fmt: skip
def test_the_sentence(cpu, known, words):
    found = compared([Run(2.0, cpu[0], 2**30)] * 3, [Run(1.0, cpu[1], 2**29)] * 3, **known)
    assert words in str(found)
    once = msgspec.structs.replace(found, off=found.off[:1], on=found.on[:1], low=0.0, high=9.0)
    assert str(once).startswith("One run each tells no difference from noise: ")
    assert "times as fast; one run each)" in str(once)


def test_the_same_runs_as_markdown():
    on = [Run(seconds, 1.5, 2**29, 1.5) for seconds in (2.0, 2.1, 1.9)]
    found = compared([Run(4.0, 3.0, 2**30, 3.0)] * 3, on)
    assert str(found).endswith(". Start-up takes 1.50 s instead of 3.00 s, the rest 500 ms instead of 1.00 s.")
    table = f"""\
|  | without autokern | with autokern |
|---|---:|---:|
| from start to end | 4.00 s | 2.00 s |
| until the first call of a model | 3.00 s | 1.50 s |
| after it | 1.00 s | 500 ms |
| CPU time | 3.00 s | 1.50 s |
| peak of memory | 1 GiB | 0.5 GiB |

{found}"""
    assert compare.FORMS["markdown"](found) == table
    assert compare.FORMS["text"](found) == str(found)
    without = msgspec.structs.replace(found, on=[*on[1:], Run(2.0, 1.5, 2**29)])
    assert "Start-up" not in str(without), "one run called no model"
    assert "first call" not in compare.FORMS["markdown"](without)


FIRST = """
import time
import gpytorch, torch
kernel, x, end = gpytorch.kernels.RBFKernel(), torch.rand(500, 9), time.monotonic() + 0.4
while time.monotonic() < end:
    kernel(x).to_dense()
"""


@pytest.mark.parametrize("on", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_first_call_of_a_model_is_seen_and_no_import_is_one(script, on):
    found, _ = compare._run(Order(script(FIRST), []), on)
    assert found.start is not None
    assert 0.3 < found.rest < found.seconds - 0.2
    assert on or compare._run(Order(script(QUIET), []), not on)[0].start is None


ENVIRONMENT = """
import os, sys
print([os.environ.get(name) for name in ("PYTHONPATH", "_AUTOKERN_FIRST_CALL")], file=sys.stderr)
"""


@pytest.mark.parametrize(("on", "path"), [(False, ""), (True, "given")])
def test_processes_that_the_program_starts_are_not_watched(monkeypatch, tmp_path, script, on, path):
    order = Order(script(ENVIRONMENT), [])
    monkeypatch.setenv("AUTOKERN_WORKERS", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [*sys.path, path])))
    assert compare._run(order, on)[1].strip().endswith(f"{[os.environ['PYTHONPATH'], None]}")


def test_the_interval_holds_the_truth():
    middle, low, high = interval([1.0, 2.0, 4.0])
    assert middle == pytest.approx(2.0)
    assert low < 1.0 < 4.0 < high
    assert interval([3.0]) == (pytest.approx(3.0), 0.0, math.inf)


def test_a_program_that_fails_is_told(script):
    with pytest.raises(AutokernError, match=r"status 3 with autokern:\nboom"):
        compare.compare(Order(script("import sys\nprint('boom', file=sys.stderr)\nsys.exit(3)"), []), 2, 1.0, print)


def test_memory_is_the_programs_own_however_large_this_process_is(script):
    """A process that is forked begins with the peak of its parent, which here has imported torch."""
    found, _ = compare._run(Order(script("x = bytearray(2**25)"), []), on=False)
    assert 2**25 < found.peak < 2**27


def test_an_interrupt_ends_the_program_and_what_it_has_started(script, monkeypatch, tmp_path):
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    path = script(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])")

    def interrupted(self):
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare._run(Order(path, []), on=False)
    process = int((tmp_path / "pid").read_text())
    while psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


@pytest.mark.slow
def test_the_command_says_what_is_saved(script):
    result = CliRunner().invoke(app, ["compare", "--pairs", "1", "--json", "--", script(GP)])
    assert result.exit_code == 1, result.stderr  # one pair tells nothing
    found = json.loads(result.stdout)
    assert (len(found["off"]), len(found["on"]), found["known"]) == (1, 1, False)
    assert "not known to 3 %" in result.stderr
    assert "served no call" not in result.stderr
    result = CliRunner().invoke(app, ["compare", "--pairs", "1", script(QUIET)])
    assert "chatter" not in result.stdout
    assert "served no call" in result.stderr


WORKERS = """
import multiprocessing, os, subprocess, sys

def served():
    before = sorted(m for m in ("torch", "autokern") if m in sys.modules and os.environ.get("LIGHT"))
    import gpytorch, linear_operator
    from gpytorch.kernels import Kernel
    return before, hasattr(Kernel.covar_dist, "__wrapped__")

if __name__ == "__main__":
    os.environ["LIGHT"] = "1"
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, *pool.apply(served))
            pool.close()
            pool.join()  # a worker that is stopped while KeOps saves its cache leaves half of it
    code = "from gpytorch.kernels import Kernel; print(hasattr(Kernel.covar_dist, '__wrapped__'))"
    print("python", subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()[-1])
    from joblib import Parallel, delayed
    print("loky", *Parallel(2, backend="loky")([delayed(served)()])[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("on", [True, False])
def test_processes_that_a_program_starts_are_served(script, monkeypatch, on):
    monkeypatch.setenv("AUTOKERN_WORKERS", str(int(on)))
    run = python("-m", "autokern", "run", script(WORKERS))
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines() if line.endswith(("True", "False"))]
    told = {words[0]: words[-1] for words in lines}
    assert told == dict.fromkeys(("spawn", "forkserver", "python", "loky"), str(on))
    assert not on or "spawn [] True" in run.stdout, "nothing is imported before the program does"


OWN = """
import builtins, os, sys
builtins.mine = __file__
_LIBRARIES = _enable = None
del os, sys
"""
CHILD = """
import sys, gpytorch
from gpytorch.kernels import Kernel
print(mine, hasattr(Kernel.covar_dist, '__wrapped__'), sum(type(f).__name__ == '_Watch' for f in sys.meta_path))
"""


@pytest.mark.parametrize("given", [None, "", "/a", ":/a", "/a::/b", "/a:"])
def test_entries_of_pythonpath_stay_empty_ones_too(monkeypatch, given):
    """An empty entry is the current folder."""
    if given is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", given)
    for _ in range(2):
        monkeypatch.setenv("PYTHONPATH", inherited.with_inherited())
    expected = f"{inherited.INHERITED}:{given}" if given else inherited.INHERITED
    assert os.environ["PYTHONPATH"] == expected.replace(":", os.pathsep)


@pytest.mark.slow
def test_a_sitecustomize_of_the_users_own_is_a_module_of_its_own(tmp_path, monkeypatch, script):
    """It knows its file, and its names do not meet those of autokern's, of which another may stand behind."""
    there, other = tmp_path / "there", tmp_path / "other" / "cli" / "inherited"
    there.mkdir()
    (there / "sitecustomize.py").write_text(OWN)
    (tmp_path / "child.py").write_text(CHILD)
    shutil.copytree(inherited.INHERITED, other)
    monkeypatch.setenv("PYTHONPATH", f"{other}:{there}", prepend=":")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::FutureWarning")  # torch's, of what gpytorch calls
    path = script(f"import subprocess, sys\nsubprocess.run([sys.executable, {str(tmp_path / 'child.py')!r}])")
    run = python("-m", "autokern", "run", path)
    assert run.stdout.split()[-3:] == [str(there / "sitecustomize.py"), "True", "0"], run.stderr
    assert run.stderr == ""
