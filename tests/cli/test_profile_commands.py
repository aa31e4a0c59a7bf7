"""`autokern profile export`; `calibrate` where others use the cores; what commands of earlier versions say."""

from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path

import msgspec
from support.loads import busy
from typer.testing import CliRunner

from autokern.cli import commands, commands_measured
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.runtime import dispatch
from autokern.system import host
from autokern.system.load import Load
from autokern.tuning import store
from autokern.tuning.profile import QUIET, Profile, Timing, Trial


def keep(*sizes: int) -> Profile:
    """Keep a profile of this host, in which a former version has tried a tool."""
    where = f"/home/{getpass.getuser()}/bin/g++ on {platform.node()} failed"
    trials = [Trial(Problem(op="qr", m=n, n=n), {"stock": Timing(1.23456789e-3)}) for n in sizes]
    here = host.current()
    profile = Profile(
        host=here.fields,
        fingerprint=here.fingerprint,
        trials=trials,
        tools={"keops": where},  # of a former version
        fruitless={"predict/float64@cpu": "2026-01-02T03:04:05Z"},
        created="2026-01-02T03:04:05Z",
    )
    path = store.save(dispatch.session().settings, profile)
    assert path is not None
    assert where not in path.read_text()
    path.write_bytes(msgspec.json.encode(profile))
    return profile


def test_an_exported_file_can_be_pinned_elsewhere(run, tmp_path, monkeypatch):
    profile, file = keep(8, 16), tmp_path / "mine.json"
    result = run("profile", "export", file)
    assert (result.exit_code, "wrote 2 problems" in result.output) == (0, True), result.output
    assert next(iter(json.loads(file.read_bytes()))) == "schema"
    assert store.read_file(file) == msgspec.structs.replace(profile, tools={}, fruitless={})
    told = json.loads(run("profile", "export", file, "--json").stdout)
    assert (told["problems"], told["fingerprint"]) == (2, host.current().fingerprint)
    monkeypatch.setenv("AUTOKERN_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("AUTOKERN_PROFILE", str(file))
    assert f"pinned by AUTOKERN_PROFILE:\n{file}" in run("show", "qr").output
    monkeypatch.delenv("AUTOKERN_PROFILE")
    kept = store.load(Settings(home=tmp_path / "none"), host.current().fingerprint)
    assert kept is None, "nothing is written"


def test_no_machine_name_user_name_or_path_leaves(run, tmp_path):
    keep(8)
    run("profile", "export", tmp_path / "mine.json")
    text = (tmp_path / "mine.json").read_text()
    for secret in (platform.node(), f"/{getpass.getuser()}", str(tmp_path), str(Path.home()), "g++", "fruitless"):
        assert len(secret) < 3 or secret not in text
    assert set(json.loads(text)["host"]) == {"system", "versions", "cpu", "accelerators", "remarks"}


def test_an_export_of_nothing_writes_no_file(run, tmp_path):
    assert (run("profile", "export", tmp_path / "mine.json").exit_code, (tmp_path / "mine.json").exists()) == (1, False)


def test_bad_orders_are_one_message(run, tmp_path):
    keep(8)
    for arguments, words in (
        (["profile", "export"], "FILE"),
        (["profile", "export", tmp_path], "no regular file"),
        (["profile", "export", tmp_path / "no" / "x.json"], "Name another file"),
        (["profile", "import", "a.json", "b.json"], "copy the file, and name the copy by AUTOKERN_PROFILE=FILE"),
        (["profile", "list", "--json"], "`show` tells"),
        (["record", "-o", "asked.json", "train.py", "--epochs", "3"], "`calibrate` measures the machine"),
    ):
        result = run(*arguments)
        assert (result.exit_code, words in result.stderr, result.stdout) == (2, True, ""), (arguments, result.output)


def test_what_was_removed_is_not_in_the_help(run):
    assert "record" not in run("--help").output
    assert {"import", "list"}.isdisjoint(run("profile", "--help").output.partition("Commands:")[2].split())


def _profile(count: int, disturbed: int = 0) -> Profile:
    trials = []
    for n in range(1, count + 1):
        stock = Timing(1.0, disturbed=0.2 if n <= disturbed else QUIET)
        trials.append(Trial(Problem(op="qr", m=n, n=n), {"stock": stock, "a": Timing(0.5, 0.5, 0.01)}))
    return Profile(trials=trials)


def test_verdicts(monkeypatch):
    monkeypatch.setattr(commands_measured.threads, "current", lambda: 2)
    calm, full = Load(2, others=0.1), Load(2, others=1.9)
    few, many, worse = _profile(3), _profile(9, disturbed=3), _profile(9, disturbed=4)
    assert commands_measured.verdict(Profile(), worse, None, calm) == ("", True)
    told, trusted = commands_measured.verdict(few, many, None, full)
    assert trusted
    assert told.startswith("meanwhile others use 1.9 of 2 cores: 9 problems measured, 3 disturbed")
    told, trusted = commands_measured.verdict(Profile(), worse, None, full)
    assert not trusted
    assert told.startswith("nothing trustworthy was measured: meanwhile others use 1.9 of 2 cores")
    assert commands_measured.verdict(many, many, ["qr"], full)[1], "nothing was left to measure"
    assert not commands_measured.verdict(worse, worse, ["qr"], full)[1]
    assert not commands_measured.verdict(Profile(), many, ["cholesky"], full)[1]


def test_calibrate_ends_with_a_finding_where_nothing_can_be_trusted(monkeypatch):
    busy(2.0)

    def measured(names, level, budget, *rest, **more):
        found = _profile(2, disturbed=2)
        dispatch.session().adopt(found)
        return found

    monkeypatch.setattr(commands_measured.evaluation, "calibrate", measured)
    dispatch.reset()
    result = CliRunner().invoke(commands.app, ["calibrate", "--budget", "4", "--no-wait"], prog_name="autokern")
    assert result.exit_code == 1
    assert "others use 2.0 of 2 cores; measuring with what is free" in result.stderr
    assert "`--thorough` were removed and are ignored" in result.stderr
    assert "nothing trustworthy" in result.stderr
    assert "2 problems measured, 2 disturbed" in result.stderr
