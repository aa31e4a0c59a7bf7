"""`autokern profile export`, `import` and `list`: what leaves a machine, what comes in, and that nothing is lost."""

from __future__ import annotations

import getpass
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from autokern.cli import commands_profile
from autokern.cli.commands import app
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.core.tool import Tool
from autokern.runtime import dispatch
from autokern.system import host
from autokern.system.host import fingerprint_of
from autokern.tuning import checksum, sharing, store
from autokern.tuning.profile import Ban, Profile, Timing, Trial

HOSTS = sorted((Path(__file__).parents[2] / "calibration" / "hosts").glob("*.json"))


@pytest.fixture
def home(tmp_path):
    return tmp_path / "autokern"


@pytest.fixture
def run():
    def invoke(*arguments: object):
        dispatch.reset()
        return CliRunner().invoke(app, ["profile", *map(str, arguments)], prog_name="autokern")

    return invoke


def own(*sizes: int, seconds: float = 1.23456789e-3, op: str = "qr", **fields: object) -> Profile:
    """A profile of this host; with fields, of a host that differs from it in those of the CPU."""
    there = host.current().fields
    there = {**there, "cpu": {**there["cpu"], **fields}}
    timing = Timing(seconds, 0.987654321, 0.0123456789, 7, 0.123456)
    trials = [Trial(Problem(op=op, m=n, n=n), {"stock": Timing(seconds), "choleskyqr2": timing}) for n in sizes]
    when = "2026-01-02T03:04:05Z"
    return Profile(host=there, fingerprint=fingerprint_of(there), trials=trials, created=when)


def keep(profile: Profile) -> Path:
    path = store.save(dispatch.session().settings, profile)
    assert path is not None
    return path


def times(home: Path, fingerprint: str | None = None) -> dict[int, float]:
    profile = store.load(Settings(home=home, strict=True), fingerprint or host.current().fingerprint)
    return {} if profile is None else {t.problem.n: t.timings["stock"].seconds for t in profile.trials}


# --- export ---------------------------------------------------------------------------------------------------------


def test_what_is_exported_is_one_compact_file_that_serves_as_a_profile(run, home, tmp_path, monkeypatch):
    keep(own(8, 16).merge(own(32, op="cholesky")))
    file = tmp_path / "mine.json"
    result = run("export", file)
    assert (result.exit_code, "wrote 3 problems of 2 ops" in result.output) == (0, True), result.output
    data = json.loads(file.read_bytes())
    assert (next(iter(data)), data["schema"], data["fingerprint"]) == ("schema", 1, host.current().fingerprint)
    assert file.read_bytes().count(b"\n") == 1
    timing = store.read_file(file).trials[0].timings["choleskyqr2"]
    assert timing == Timing(1.2346e-3, 0.98765, 0.012346, 7, 0.123)
    monkeypatch.setenv("AUTOKERN_PROFILE", str(file))
    monkeypatch.setenv("AUTOKERN_HOME", str(tmp_path / "none"))
    assert '"in force"' in run("list", "--json").stdout


def test_standard_output_is_the_default(run, tmp_path, monkeypatch):
    keep(own(8))
    result = run("export")
    assert (result.exit_code, result.stderr) == (0, "")
    (tmp_path / "piped.json").write_text(result.stdout)
    assert len(store.read_file(tmp_path / "piped.json").trials) == 1
    monkeypatch.setattr(commands_profile, "_on_terminal", lambda: True)
    result = run("export")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "FILE" in result.stderr


def test_only_some_ops_are_exported(run, tmp_path):
    bans = [Ban(op, "looped", "float64", "cpu", "wrong") for op in ("qr", "cholesky")]
    setup, levels = {"qr.cpu": 1.0, "cholesky.cpu": 2.0}, {"qr/float64@cpu": "full", "cholesky/float64@cpu": "quick"}
    both = msgspec.structs.replace(own(8).merge(own(8, op="cholesky")), banned=bans, setup=setup, levels=levels)
    keep(both)
    result = run("export", tmp_path / "qr.json", "--ops", "qr", "--json")
    told = json.loads(result.stdout)
    assert (told["ops"], told["problems"], told["bytes"]) == (["qr"], 1, (tmp_path / "qr.json").stat().st_size)
    assert b"cholesky/" not in (tmp_path / "qr.json").read_bytes()
    found = store.read_file(tmp_path / "qr.json")
    assert ([t.problem.op for t in found.trials], found.banned, found.setup) == (["qr"], bans[:1], {"qr.cpu": 1.0})


def test_no_machine_name_user_name_or_path_leaves(run, home, tmp_path):
    where = f"/home/{getpass.getuser()}/bin/g++ on {platform.node()} failed"
    tools = {"keops": Tool(False, found=where, setting=where)}
    keep(msgspec.structs.replace(own(8), tools=tools, fruitless={"predict/float64@cpu": "2026-01-02T03:04:05Z"}))
    assert where in (home / f"{host.current().fingerprint}.json").read_text()
    run("export", tmp_path / "mine.json")
    text = (tmp_path / "mine.json").read_text()
    for secret in (platform.node(), f"/{getpass.getuser()}", str(tmp_path), str(Path.home()), "g++", "fruitless"):
        assert len(secret) < 3 or secret not in text
    assert set(json.loads(text)["host"]) == {"system", "versions", "cpu", "accelerators", "remarks"}


def test_an_export_of_nothing_writes_no_file(run, home, tmp_path):
    file = tmp_path / "mine.json"
    assert (run("export", file).exit_code, file.exists()) == (1, False)
    keep(own(8))
    result = run("export", file, "--ops", "cholesky")
    assert (result.exit_code, file.exists(), "of cholesky" in result.stderr) == (1, False, True)


def test_bad_orders_are_one_message(run, tmp_path):
    keep(own(8))
    for arguments, words in (
        (("export", tmp_path / "x.json", "--ops", "qrr"), "unknown op 'qrr'"),
        (("export", tmp_path / "x.json", "--ops", ","), "empty list of ops"),
        (("export", tmp_path), "no regular file"),
        (("export", tmp_path / "no" / "x.json"), "Name another file"),
        (("import",), "FILE"),
        (("import", tmp_path / "gone.json"), "gone.json"),
        (("remove",), "remove"),
    ):
        result = run(*arguments)
        assert (result.exit_code, words in result.stderr, result.stdout) == (2, True, ""), (arguments, result.output)
    assert not (tmp_path / "x.json").exists()


# --- import ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path):
    def written(profile: Profile, name: str = "file.json") -> Path:
        store.write_file(tmp_path / name, profile, compact=True)
        return tmp_path / name

    return written


def test_a_file_of_this_machine_comes_into_force_and_replaces_nothing(run, home, write):
    keep(own(8, seconds=1e-3))
    result = run("import", write(own(8, 16, seconds=2e-3)))
    assert result.exit_code == 0, result.output
    assert "2 problems, 1 new" in result.output
    assert "merged into this machine's profile" in result.output
    assert times(home) == {8: 1e-3, 16: 2e-3}
    again = json.loads(run("import", write(own(8, 16)), "--json").stdout)["imports"]
    assert [(found["own"], found["problems"], found["new"]) for found in again] == [(True, 2, 0)]
    assert "in force" in run("list").output


def test_a_file_of_another_machine_is_a_neighbours(run, home, write):
    neighbour = own(8, 16, threads=64)
    result = run("import", write(neighbour))
    assert result.exit_code == 0, result.output
    assert "another machine" in result.output
    assert "prior only (likeness" in result.output
    assert times(home) == {}
    assert times(home, neighbour.fingerprint) == {8: neighbour.trials[0].timings["stock"].seconds} | dict.fromkeys(
        [16], neighbour.trials[1].timings["stock"].seconds
    )
    assert "too unlike" in run("import", write(own(8, threads=2**20))).output
    keep(own(8))
    (row,) = [row for row in json.loads(run("list", "--json").stdout)["profiles"] if row["role"] == "prior"]
    assert (row["fingerprint"], row["problems"]) == (neighbour.fingerprint, 2)


def test_recorded_hosts_are_imported_at_once(run, home):
    found = json.loads(run("import", *HOSTS, "--json").stdout)["imports"]
    assert [result["problems"] for result in found] == [len(store.read_file(path).trials) for path in HOSTS]
    assert {path.stem for path in home.glob("*.json")} == {store.read_file(path).fingerprint for path in HOSTS}


def _bytes(profile: Profile) -> bytes:
    return store.plain(profile)


BROKEN = {
    "empty": lambda p: b"",
    "cut": lambda p: _bytes(p)[:-20],
    "no JSON": lambda p: b"\x80\x04pickle",
    "another document": lambda p: b'{"nodes": 3}',
    "newer": lambda p: _bytes(p).replace(b'"schema":1', b'"schema":2'),
    "newer and sealed": lambda p: checksum.sealed(2, _bytes(p)),
    "damaged seal": lambda p: checksum.sealed(1, _bytes(p))[:-3] + b"1}\n",
    "no measurements": lambda p: _bytes(msgspec.structs.replace(p, trials=[])),
    "no host": lambda p: _bytes(msgspec.structs.replace(p, host={}, fingerprint="")),
    "edited host": lambda p: _bytes(p).replace(b'"threads":64', b'"threads":8'),
    "foreign fingerprint": lambda p: _bytes(msgspec.structs.replace(p, fingerprint=host.current().fingerprint)),
    "a path as fingerprint": lambda p: _bytes(msgspec.structs.replace(p, fingerprint="../../x")),
    "impossible time": lambda p: _bytes(p).replace(b'"seconds":0.00123456789', b'"seconds":-1'),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_refused_and_loses_nothing(run, home, write, tmp_path, fault):
    kept = keep(own(8))
    before = kept.read_bytes()
    bad, good = tmp_path / "bad.json", write(own(16), "good.json")
    bad.write_bytes(BROKEN[fault](own(8, threads=64)))
    result = run("import", good, bad)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "asked " in result.stderr
    assert "bad.json; found: " in result.stderr
    assert kept.read_bytes() == before  # nor was the good one taken
    assert [path.name for path in home.glob("*.json")] == [kept.name]


def test_a_folder_that_cannot_be_written_is_told(run, monkeypatch, tmp_path, write):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AUTOKERN_HOME", str(tmp_path / "file" / "home"))
    result = run("import", write(own(8)))
    assert result.exit_code == 2
    assert "AUTOKERN_HOME" in result.stderr


def test_a_failing_disk_keeps_what_was_there(run, home, monkeypatch, write):
    kept = keep(own(8))
    before, file = kept.read_bytes(), write(own(16))
    monkeypatch.setattr(sharing.store, "sealed", lambda schema, body: (_ for _ in ()).throw(OSError(28, "no space")))
    result = run("import", file)
    assert (result.exit_code, "no space" in result.stderr) == (2, True)
    assert kept.read_bytes() == before


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="needs a user other than root")
def test_a_home_that_is_read_only_is_told(run, home, write):
    keep(own(8))
    home.chmod(0o500)
    result = run("import", write(own(16)))
    home.chmod(0o700)
    assert (result.exit_code, "AUTOKERN_HOME" in result.stderr, times(home)) == (2, True, {8: 1.23456789e-3})


def test_a_kept_profile_of_a_newer_autokern_stays(run, home, write):
    kept = keep(own(8))
    kept.write_bytes(checksum.sealed(2, b"{}"))
    before = kept.read_bytes()
    result = run("import", write(own(16)))
    assert (result.exit_code, "newer autokern" in result.stderr) == (2, True)
    assert kept.read_bytes() == before


def test_a_pinned_profile_is_said_to_stay_in_force(run, home, monkeypatch, write):
    file = write(own(8))
    monkeypatch.setenv("AUTOKERN_PROFILE", str(file))
    result = run("import", file)
    assert (result.exit_code, "AUTOKERN_PROFILE is set" in result.stderr) == (0, True)
    assert len(times(home)) == 1


@pytest.mark.slow
def test_two_processes_import_at_once(home, write):
    files = [write(own(*range(1 + 200 * who, 201 + 200 * who), threads=64), f"{who}.json") for who in range(2)]
    environment = {**os.environ, "AUTOKERN_HOME": str(home)}
    crowd = [
        subprocess.Popen([sys.executable, "-m", "autokern", "profile", "import", str(file)], env=environment)
        for file in files
    ]
    assert [process.wait(timeout=120) for process in crowd] == [0, 0]
    assert set(times(home, own(threads=64).fingerprint)) == set(range(1, 401))


# --- list -----------------------------------------------------------------------------------------------------------


def test_list_tells_every_profile_and_its_role(run, home, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    keep(own(8))
    keep(own(8, 16, threads=64))
    keep(own(8, threads=2**13, model="Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz"))
    (home / ("0" * 32 + ".json")).write_text("{")
    result = run("list")
    assert result.exit_code == 0
    assert max(len(line) for line in result.output.splitlines() if "/" not in line) <= 80  # a path is not wrapped
    here = host.current()
    for words in (
        "in force",
        "prior, ",
        "unused",
        "faulty",
        here.fingerprint[:8],
        "2026-01-02",
        "8480+",
        str(home),
    ):
        assert words in result.output
    assert here.fields["versions"]["torch"] in result.output
    rows = json.loads(run("list", "--json").stdout)["profiles"]
    assert [(row["role"], row["problems"]) for row in rows] == [
        ("in force", 1),
        ("prior", 2),
        ("unused", 1),
        ("faulty", 0),
    ]
    assert [row["likeness"].get("cpu") for row in rows[:1]] == [1.0]
    assert rows[3]["fault"]
    assert (home / ("0" * 32 + ".json")).read_text() == "{"  # looking changes nothing


def test_list_says_that_there_is_nothing(run):
    result = run("list", "--json")
    assert (result.exit_code, json.loads(result.stdout)["profiles"], "autokern calibrate" in result.stderr) == (
        1,
        [],
        True,
    )


def test_list_tells_of_layers(run, home, monkeypatch, tmp_path, write):
    keep(own(8, threads=32))
    mine, other = write(own(8), "mine.json"), write(own(8, threads=64), "other.json")
    monkeypatch.setenv("AUTOKERN_PROFILE", os.pathsep.join(map(str, (other, mine))))
    rows = json.loads(run("list", "--json").stdout)["profiles"]
    assert [(row["file"], row["role"]) for row in rows] == [(str(mine), "in force"), (str(other), "prior")]
    assert str(other) in run("list").output
    monkeypatch.setenv("AUTOKERN_PROFILE", str(other))
    assert [row["role"] for row in json.loads(run("list", "--json").stdout)["profiles"]] == ["in force"]  # as it is
    monkeypatch.setenv("AUTOKERN_PROFILE", os.pathsep.join(map(str, (other, tmp_path / "gone.json"))))
    result = run("list")
    assert (result.exit_code, "gone.json" in result.stderr) == (2, True)


def test_the_commands_are_there_for_everyone():
    answer = subprocess.run(
        [sys.executable, "-m", "autokern", "profile", "-h"], capture_output=True, text=True, check=True, timeout=120
    )
    assert all(name in answer.stdout for name in ("export", "import", "list"))
