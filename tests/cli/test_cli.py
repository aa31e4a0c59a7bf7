"""The command line as a user meets it: exit status, one message per error, JSON that parses, programs run as ever."""

from __future__ import annotations

import json
import sys

import msgspec
import pytest
from support.programs import QUIET, python
from typer.testing import CliRunner

import autokern
from autokern.cli import app as runner
from autokern.cli import commands_measured, summary, tables
from autokern.cli.commands import app
from autokern.core.errors import SettingsError
from autokern.core.problem import Problem
from autokern.runtime import dispatch
from autokern.system import host
from autokern.tuning import measuring, store
from autokern.tuning.profile import Ban, Examined, Profile, Timing, Trial


@pytest.fixture
def home(tmp_path):
    return tmp_path / "autokern"


def _profile() -> Profile:
    """QR in which CholeskyQR2 wins from 100 columns on, and one ban."""
    here = host.current()
    trials = [
        Trial(
            Problem(op="qr", m=10 * n, n=n),
            {"stock": Timing(1e-3 * n), "choleskyqr2": Timing(1e-3 * n * ratio, ratio, 0.01, 5)},
        )
        for n, ratio in ((10, 2.0), (50, 1.4), (200, 0.7), (400, 0.5))
    ]
    ban = Ban("cholesky", "huge-pages", "float32", "cpu", "error 3 times its bound")
    when = "2026-01-02T03:04:05Z"
    setup = {"kernel_matrix.compiled": 2.5}
    return Profile(
        host=here.fields, fingerprint=here.fingerprint, trials=trials, banned=[ban], setup=setup, created=when
    )


@pytest.fixture
def measured(home):
    store.save(dispatch.session().settings, _profile())


def test_show_tells_winners_bans_and_set_up(run, measured, home):
    result = run("show")
    assert result.exit_code == 0
    for words in ("choleskyqr2 (2 of 4), stock (2)", "cholesky.huge-pages", "2.50 s", "2026-01-02", str(home)):
        assert words in result.output
    result = run("show", "--json")
    found = json.loads(result.stdout)
    assert found["ops"][0]["won"] == {"choleskyqr2": 2, "stock": 2}
    assert str(home) not in result.stdout
    assert "(4000, 400)" in run("show", "qr").output
    found = json.loads(run("show", "qr", "--json").stdout)
    assert [w["candidate"] for w in found["winners"]] == ["stock", "stock", "choleskyqr2", "choleskyqr2"]


def test_show_says_that_nothing_was_measured(run):
    result = run("show")
    assert result.exit_code == 1
    assert "nothing was measured" in result.stderr
    assert "autokern calibrate" in result.stderr
    result = run("show", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ops"] == []


def test_explain_decides_from_the_profile(run, measured):
    result = run("explain", "qr", "--m", "4000", "--n", "400")
    assert result.exit_code == 0
    assert "runs choleskyqr2" in result.output
    decision = json.loads(run("explain", "qr", "--m", "4000", "--n", "400", "--json").stdout)
    assert decision["candidate"] == "choleskyqr2"
    assert decision["source"] == "measured"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain"], "autokern.explain()"),
        (["explain", "qrr"], "unknown op 'qrr'"),
        (["explain", "qr", "--device", "tpu"], "device 'tpu'"),
        (["explain", "qr", "--dtype", "float16"], "float32 and float64"),
        (["explain", "qr", "--variant", "blue"], "variant 'blue'"),
        (["explain", "kernel_matrix", "--grad", "everything"], "grad 'everything'"),
        (["explain", "qr", "--n", "-3"], "--n"),
        (["explain", "qr", "--n", "many"], "--n"),
        (["show", "qrr"], "unknown op 'qrr'"),
        (["calibrate", "--ops", "qr,qrr"], "unknown op 'qrr'"),
        (["calibrate", "--ops", ","], "empty list of ops"),
        (["calibrate", "--device", "tpu"], "device 'tpu'"),
        (["calibrate", "--budget", "0"], "a budget of 0 s"),
        (["calibrate", "--budget", "inf"], "budget of inf s"),
        (["calibrate", "--budget", "soon"], "--budget"),
        (["calibrate", "--quick", "--full"], "choose one"),
        (["bench", "--quick"], "`bench` was removed; `autokern compare"),
        (["shew"], "shew"),
        (["--colour"], "--colour"),
    ],
)
def test_bad_input_is_answered_by_one_message_and_status_2(run, arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize("command", [["show"], ["explain", "qr"], ["calibrate"], ["clear"]])
def test_a_bad_variable_is_named(monkeypatch, command):
    monkeypatch.setenv("AUTOKERN_BUDGET", "soon")
    monkeypatch.setattr(dispatch, "_session", None)  # as in a new process
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "AUTOKERN_BUDGET='soon'" in result.stderr


def test_calibrate_measures_tells_and_writes(run, home, tmp_path):
    file = tmp_path / "profile.json"
    result = run("calibrate", "--ops", "qr", "--budget", "1.5", "--output", str(file))
    assert result.exit_code == 0, result.stderr
    assert "problems measured" in result.output
    assert store.read_file(file).trials
    assert (home / f"{host.current().fingerprint}.json").is_file()
    assert run("show", "qr").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--accuracy", "rough"], "there are same, approximate"),
        (["--workload", "asked.json"], "No such option"),
        (["--output", "/gone/folder/file.json"], "No such file or directory. Name another file"),
        (["--budget", "nan"], "budget of nan s"),
    ],
)
def test_calibrate_tells_a_fault_of_the_order_before_it_measures(run, monkeypatch, arguments, told):
    monkeypatch.setattr("autokern.evaluation.calibrate.display", lambda *args: pytest.fail("it began"))
    result = run("calibrate", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_calibrate_says_where_no_problem_has_a_choice(run, make_op):
    op = make_op("alone")
    op.candidate("stock")(lambda a: 2 * a)
    result = run("calibrate", "--ops", "alone", "--budget", "0.5")
    assert result.exit_code == 2
    assert "no problem of alone has more than one candidate" in result.stderr
    op.candidate("other")(lambda a: a + a)
    result = run("calibrate", "--ops", "alone", "--budget", "0.0000001")
    assert "allow more with --budget" in result.stderr


def test_a_second_calibration_measures_only_what_the_first_one_left_and_what_is_new(run, make_op, monkeypatch):
    monkeypatch.setattr(commands_measured, "verdict", lambda *_: ("", True))  # others may use the cores
    monkeypatch.setattr(measuring, "WORTHLESS", 2.0)
    op = make_op("tiny")
    op.candidate("stock")(lambda a: 2 * a)
    op.candidate("other")(lambda a: a + a)

    def measured():
        """The problems: one that others disturbed is tried again, and each trial is kept."""
        return {trial.problem for trial in dispatch.session().profile.trials}

    first = run("calibrate", "--ops", "tiny", "--budget", "3")
    assert " problems measured in " in first.output
    count = len(measured())
    assert 0 < count <= 14, "of sizes from 2 to 8 in two dtypes"
    op.candidate("new")(lambda a: a * 2)
    assert run("calibrate", "--ops", "tiny", "--budget", "3").exit_code == 0
    assert count <= len(measured()) <= 14
    assert any("new" in trial.timings for trial in dispatch.session().profile.trials)


def test_calibrate_shows_what_is_in_force_when_it_is_interrupted(run, monkeypatch):
    def interrupted(*args, **kwargs):
        store.save(dispatch.session().settings, _profile())
        dispatch.session().adopt(_profile())
        raise KeyboardInterrupt

    monkeypatch.setattr("autokern.cli.commands_measured.evaluation.calibrate", interrupted)
    result = run("calibrate", "--json")
    assert result.exit_code == 130
    assert "the profile of before stays in force" in result.stderr
    assert json.loads(result.stdout)["ops"][0]["problems"] == 4
    assert run("show").exit_code == 0


def test_calibrate_leaves_a_pinned_profile_alone(run, monkeypatch, tmp_path):
    path = tmp_path / "pinned.json"
    store.write_file(path, _profile())
    before = path.read_bytes()
    monkeypatch.setenv("AUTOKERN_PROFILE", str(path))
    result = run("calibrate", "--ops", "qr", "--budget", "1")
    assert result.exit_code == 2
    assert "AUTOKERN_PROFILE" in result.stderr
    assert path.read_bytes() == before
    assert "choleskyqr2" in run("show").output


def test_clear_removes_profiles_and_says_which(run, measured, home):
    (home / "notes.txt").write_text("mine")
    result = run("clear", "--json")
    assert result.exit_code == 0
    assert any(path.endswith(".json") for path in json.loads(result.stdout)["removed"])
    assert [path.name for path in home.iterdir()] == ["notes.txt"]
    assert "nothing to remove" in run("clear").output
    assert run("show").exit_code == 1


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
    assert ours.stderr.splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{path}", line 10, in <module>',
    ]
    assert ours.stderr.splitlines()[-1] == "ZeroDivisionError: on purpose"


@pytest.mark.slow
def test_run_a_module_from_the_working_directory_and_count_its_calls(program):
    ours = python("-m", "autokern", "run", "--stats", "--explain", "-m", "script", "--stats", cwd=program)
    assert ours.returncode == 7
    assert str([str(program / "script.py"), "--stats"]) in ours.stdout
    assert "kernel_matrix" in ours.stderr
    assert "what ran, on what, and why" in ours.stderr
    assert "`--stats` was removed and is ignored" in ours.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [("run nowhere.py", "can't open file 'nowhere.py'"), ("run --fast x.py", "--fast"), ("run", "nothing to run"),
     ("compare", "")],
)  # fmt: skip
def test_what_cannot_run_is_refused_by_one_message(monkeypatch, capsys, line, words):
    monkeypatch.setattr(sys, "argv", ["autokern", *line.split()])
    with pytest.raises(SystemExit, match="2"):
        sys.exit(runner.main())
    told = capsys.readouterr().err
    assert words in told
    assert told.count("autokern") == 1 or "nowhere" in line
    assert autokern.stats() == {}


@pytest.mark.parametrize(
    ("words", "order"),
    [
        (["--stats", "--explain", "s.py", "-m"], runner.Order("s.py", ["-m"], decisions=True)),
        (["-m", "pytest", "--stats"], runner.Order("pytest", ["--stats"], module=True)),
        (["-mpytest"], runner.Order("pytest", [], module=True)),
        (["--", "--odd.py"], runner.Order("--odd.py", [])),
        (["--profile", "-c", "1", "--stats"], runner.Order("-c", ["1", "--stats"], lines=True)),
        (["-", "a"], runner.Order("-", ["a"])),
        (["--help"], None),
    ],
)
def test_run_leaves_options_behind_the_program_to_it(words, order):
    assert runner.parse(words) == order
    for refused in (["-m"], ["-c"], ["-x"]):
        with pytest.raises(SettingsError, match="-m and a module"):
            runner.parse(refused)


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
    (kernel,) = [line.split() for line in lines if "program.py:7 " in line]
    (sleep,) = [line.split() for line in lines if "program.py:10 " in line]
    assert 0.2 < float(kernel[0]) < 1.0
    assert float(kernel[1]) > 0.1, "autokern's part"
    assert sleep[0] == sleep[1], "by nobody known"
    assert 0.3 < float(sleep[0]) < 0.8


def test_tables_fit_a_terminal_of_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    profile = _profile()
    problem = Problem(op="kernel_matrix", m=4000, n=4000, d=32, variant="matern52/cross/ard", grad="theta/x", batch=256)
    long = Trial(problem, {"stock": Timing(1e-3), "tiled": Timing(5e-4, 0.5)})
    exam = [Examined(task="a step of training, 100 points", seconds=1e-3, shipped=0.5, new=0.4, kept="stock")]
    profile = msgspec.structs.replace(profile, trials=[*profile.trials, long], exam=exam)
    found = summary.known(profile, ["qr", "kernel_matrix"])
    tables.show(*tables.of_known(summary.known(profile), "a title"), *tables.winners(found.winners))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("training, 100 points" in line and "2.00" in line and "2.50" in line for line in lines)
    assert any("(here stock choices are kept)" in line for line in lines)
    assert any("256 × (4000, 4000) d=32" in line and "2.00" in line for line in lines)
