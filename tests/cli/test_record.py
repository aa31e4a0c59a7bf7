"""What programs ask is recorded when their processes end, however they end; nothing of it harms the program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import autokern
from autokern.cli import record
from autokern.cli.commands import app
from autokern.core.errors import AutokernWarning, ProfileError, SettingsError
from autokern.core.problem import Problem
from autokern.core.settings import WORKLOAD
from autokern.runtime import dispatch
from autokern.system.files import Folder
from autokern.tuning import workload

PROGRAM = """
import os, sys
import torch, gpytorch
x = torch.rand(30, 2, dtype=torch.float64)
for _ in range(3):
    gpytorch.kernels.RBFKernel().double()(x).to_dense()
{more}
"""
KERNEL = Problem(op="kernel_matrix", m=30, n=30, d=2, grad="theta", variant="rbf/same/iso")


@pytest.fixture
def program(tmp_path):
    def write(more: str = "") -> Path:
        path = tmp_path / "script.py"
        path.write_text(PROGRAM.format(more=more))
        return path

    return write


def _started(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    surroundings = {**os.environ, **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *map(str, arguments)], text=True, env=surroundings, **pipes)


def _ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def _python(*arguments: object, **environment: str) -> tuple[int, str, str]:
    return _ended(_started(*arguments, **environment))


@pytest.mark.slow
def test_two_runs_add_up_and_say_what_they_wrote(program, tmp_path, monkeypatch):
    script = program("os.chdir('/'); print(sys.argv, os.path.basename(sys.path[0]))\nsys.exit(7)")
    monkeypatch.chdir(tmp_path)
    status, out, err = _python("-m", "autokern", "record", "script.py", "-o", "x")
    assert status == 7
    assert out.split("\n")[0] == f"['script.py', '-o', 'x'] {tmp_path.name}"
    assert f"1 problems in 3 calls of kernel_matrix were added to {tmp_path / WORKLOAD}" in err
    assert workload.read(tmp_path / WORKLOAD).calls == {KERNEL: 3}
    status, _, err = _python("-m", "autokern", "record", "--output", WORKLOAD, "-m", script.stem)
    assert status == 7
    assert "which now has 1 problems of 2 recordings" in err
    assert workload.read(tmp_path / WORKLOAD) == workload.Workload({KERNEL: 6}, 2)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".py", ".json", ""}, "nothing temporary stays"


@pytest.mark.slow
def test_a_recording_below_autokern_run_records(program, tmp_path):
    script, file = program(), tmp_path / "asked.json"
    outer = tmp_path / "outer.py"
    command = [sys.executable, "-m", "autokern", "record", "-o", str(file), str(script)]
    outer.write_text(f"import subprocess\nsubprocess.run({command!r}, check=True)\n")
    status, _, err = _python("-m", "autokern", "run", outer)
    assert status == 0, err
    assert workload.read(file).calls == {KERNEL: 3}


@pytest.mark.slow
def test_two_processes_at_once_lose_nothing_and_exceptions_pass_through(program, tmp_path):
    script, file = program("raise ZeroDivisionError('on purpose')"), tmp_path / "asked.json"
    both = [_started("-m", "autokern", "record", "-o", file, script) for _ in range(2)]
    for process in both:
        status, _, err = _ended(process)
        assert status == 1
        assert err.startswith('Traceback (most recent call last):\n  File "' + str(script))
        assert "ZeroDivisionError: on purpose\nautokern: 1 problems in 3 calls" in err
    assert workload.read(file) == workload.Workload({KERNEL: 6}, 2)


CHILDREN = """
def more(count):
    for _ in range(count):
        autokern.linalg.cholesky(torch.eye(20, dtype=torch.float64))
import multiprocessing
more(1)
child = multiprocessing.get_context("fork").Process(target=more, args=(10,))
child.start()
child.join()
pid = os.fork()
if pid == 0:
    more(100)
    sys.exit(0)
os.waitpid(pid, 0)
pid = os.fork()
if pid == 0:
    more(1000)
    os._exit(0)
os.waitpid(pid, 0)
with autokern.using(accuracy="approximate"):
    gpytorch.kernels.RBFKernel().double()(x).to_dense()
assert sum(autokern.stats()["kernel_matrix"].values()) == 4
"""


@pytest.mark.slow
def test_forked_children_tell_their_own_calls_and_using_counts(program, tmp_path):
    file = tmp_path / "asked.json"
    status, out, err = _python(
        "-c",
        f"import autokern.auto, autokern\n{program(CHILDREN).read_text()}",
        AUTOKERN_RECORD=str(file),
        OMP_NUM_THREADS="1",  # with more, a forked child hangs in torch itself, at its first shared loop
    )
    assert (status, out, err) == (0, "", "")
    found = workload.read(file)
    assert found.calls == {KERNEL: 4, Problem(op="cholesky", m=20, n=20): 111}
    assert found.recordings == 3


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_told_at_the_start(program, tmp_path):
    script = program("print('ran')")
    broken = tmp_path / "broken.json"
    broken.write_text("no json")
    for file in (tmp_path / "none" / "asked.json", broken):
        status, out, err = _python("-m", "autokern", "record", "-o", file, script)
        assert (status, out) == (2, "")
        assert err.startswith(f"autokern: asked to record in {file}; found: ")
        assert len(err.splitlines()) == 1
    status, out, err = _python(
        "-W", "ignore::DeprecationWarning", "-c", "import autokern.auto; print('ran')", AUTOKERN_RECORD=str(broken)
    )
    assert (status, out) == (0, "ran\n")
    assert "AutokernWarning: nothing is recorded: asked to record in" in err
    assert broken.read_text() == "no json"


@pytest.mark.slow
def test_a_file_that_is_lost_meanwhile_harms_nothing(program, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    script = program(f"import shutil; shutil.rmtree({str(folder)!r}); print('ran'); sys.exit(3)")
    status, out, err = _python("-m", "autokern", "record", "-o", folder / "asked.json", script, AUTOKERN_STRICT="1")
    assert (status, out) == (3, "ran\n")
    assert err.startswith("autokern: nothing was recorded: asked to record in")
    assert "Traceback" not in err


def test_what_has_no_choice_is_left_out_and_forgotten_calls_are_kept(monkeypatch, tmp_path):
    file = tmp_path / "asked.json"
    monkeypatch.setenv("AUTOKERN_RECORD", str(file))
    import torch

    session = dispatch.reset()
    recorder = session.recorder
    assert recorder is not None
    assert workload.read(file) == workload.Workload(), "the file is there from the start"
    with autokern.enabled():
        assert dispatch.session() is session
        for n in (5, 6):
            autokern.linalg.cholesky(torch.eye(n, dtype=torch.float64))
            session.forget()
        autokern.linalg.cholesky(torch.eye(5, dtype=torch.float64))
        autokern.linalg.cholesky(torch.eye(5, dtype=torch.float16).float().half().double())
        autokern.linalg.cholesky(torch.empty(0, 0, dtype=torch.float64))
    recorder.finish()
    expected = {Problem(op="cholesky", m=5, n=5): 3, Problem(op="cholesky", m=6, n=6): 1}
    assert workload.read(file) == workload.Workload(expected, 1)
    recorder.finish()
    assert workload.read(file) == workload.Workload(expected, 1), "nothing is told twice"
    autokern.linalg.cholesky(torch.eye(6, dtype=torch.float64))
    recorder.finish()
    expected[Problem(op="cholesky", m=6, n=6)] += 1
    assert workload.read(file) == workload.Workload(expected, 1)
    assert sum(expected.values()) == sum(autokern.stats()["cholesky"].values()) - 1, "a matrix of no rows is no problem"


def test_a_calibration_is_not_recorded(monkeypatch, tmp_path):
    file = tmp_path / "asked.json"
    monkeypatch.setenv("AUTOKERN_RECORD", str(file))
    recorder = dispatch.reset().recorder
    autokern.calibrate(["cholesky", "inv_quad_logdet"], budget=1.0, progress=False)
    recorder.finish()
    assert workload.read(file) == workload.Workload()


def test_an_op_without_other_candidates_is_not_recorded(monkeypatch, tmp_path, make_op):
    import torch

    monkeypatch.setenv("AUTOKERN_RECORD", str(tmp_path / "asked.json"))
    recorder = dispatch.reset().recorder
    lonely = make_op("lonely")
    lonely.candidate("stock")(lambda a: 2 * a)
    dispatch.route(lonely)(torch.ones(3, 3))
    recorder.finish()
    assert recorder.written is None


def test_settings_of_recording(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOKERN_RECORD", str(tmp_path / "none" / "asked.json"))
    with pytest.warns(AutokernWarning, match="nothing is recorded"):
        assert dispatch.reset().recorder is None
    monkeypatch.setenv("AUTOKERN_STRICT", "1")
    with pytest.raises(ProfileError, match="asked to record"):
        dispatch.reset()
    monkeypatch.setenv("AUTOKERN", "0")
    assert dispatch.reset().recorder is None
    script = tmp_path / "script.py"
    script.write_text("")
    with pytest.raises(SettingsError, match="AUTOKERN=0"):
        record.execute(record.parse([str(script)]))


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 0)() == 0, reason="root writes anywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ProfileError, match="Permission denied"):
            workload.add(tmp_path / "asked.json", workload.Workload())
    finally:
        tmp_path.chmod(0o700)


def test_a_read_only_file_system_is_refused(monkeypatch, tmp_path):
    def refused(self, *_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Folder, "open", refused)
    with pytest.raises(ProfileError, match="Read-only file system"):
        workload.add(tmp_path / "asked.json", workload.Workload())


def test_options_before_the_program_are_autokerns():
    for words in (["-o", "f"], ["-of"], ["--output", "f"], ["--output=f"], ["-o=f"]):
        order = record.parse([*words, "--stats", "s.py", "-o", "g"])
        assert order.file == Path("f").absolute(), words
        assert order.program == ("s.py", ["-o", "g"], False, True, False, None)
    assert record.parse(["-m", "module"]).file == Path(WORKLOAD).absolute()
    assert record.parse(["--help"]) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOKERN_RECORD", "given")
        assert record.parse(["s.py"]).file == Path("given").absolute()
        assert record.parse(["-o", "f", "s.py"]).file == Path("f").absolute()
    for words in (["-o"], [], ["--fast", "s.py"], ["-o", "f"]):
        with pytest.raises(SettingsError, match=r"record SCRIPT|names no file|record has no option"):
            record.parse(words)
    with pytest.raises(SettingsError, match="nowhere"):
        record.execute(record.parse(["nowhere.py"]))


def test_help_and_calibrate_of_a_file(tmp_path):
    run = CliRunner()
    assert "record" in run.invoke(app, ["--help"]).output
    assert run.invoke(app, ["record", "--help"]).exit_code == 0
    file = tmp_path / "asked.json"
    problem = Problem(op="qr", m=66, n=6)
    workload.add(file, workload.Workload({problem: 3, Problem(op="foreign"): 1}, 1))
    found = run.invoke(app, ["calibrate", "--workload", str(file), "--budget", "3"])
    assert found.exit_code == 0, found.output
    assert "1 problems measured" in found.output
    assert "autokern: problems of the workload are left out: 1 of foreign" in found.stderr
    assert autokern.explain("qr", m=66, n=6).source == "measured"
    file.write_text("broken")
    found = run.invoke(app, ["calibrate", "--workload", str(file)])
    assert found.exit_code == 2
    assert "asked for the workload in" in found.stderr
