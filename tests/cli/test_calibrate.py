"""`autokern calibrate`: what it measures and keeps, and what it says where others use the cores; the file to export."""

import getpass
import json
import platform
from pathlib import Path

import msgspec
import pytest
import torch
from support.loads import busy

from autokern.cli import commands_measured
from autokern.core.problem import Problem
from autokern.runtime import dispatch
from autokern.system.load import Load
from autokern.tuning import measuring, store
from autokern.tuning.profile import QUIET, Profile, Timing, Trial


def test_it_measures_tells_and_writes(run, tmp_path):
    file = tmp_path / "profile.json"
    result = run("calibrate", "--ops", "qr", "--budget", "1.5", "--output", file)
    assert result.exit_code == 0, result.stderr
    assert "problems measured" in result.output
    assert store.read_file(file).trials
    assert run("show", "qr").exit_code == 0


def test_it_says_where_no_problem_has_a_choice(run, make_op):
    op = make_op("alone")
    op.candidate("stock")(lambda a: 2 * a)
    result = run("calibrate", "--ops", "alone", "--budget", "0.5")
    assert result.exit_code == 2
    assert "no problem of alone has more than one candidate" in result.stderr
    op.candidate("other")(lambda a: a + a)
    assert "allow more with --budget" in run("calibrate", "--ops", "alone", "--budget", "0.0000001").stderr


def test_a_second_one_measures_only_what_the_first_one_left_and_what_is_new(run, make_pair, monkeypatch):
    monkeypatch.setattr(commands_measured, "verdict", lambda *_: ("", True))  # others may use the cores
    monkeypatch.setattr(measuring, "WORTHLESS", 2.0)
    op = make_pair("tiny")

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


def quiet_or_not(count: int, disturbed: int = 0) -> Profile:
    quiet = [QUIET if n > disturbed else 0.2 for n in range(1, count + 1)]
    timings = [{"stock": Timing(1.0, disturbed=waited), "a": Timing(0.5, 0.5, 0.01)} for waited in quiet]
    return Profile(trials=[Trial(Problem(op="qr", m=n, n=n), found) for n, found in enumerate(timings, 1)])


@pytest.mark.parametrize(
    ("found", "error", "status", "told"),
    [
        (quiet_or_not(4), KeyboardInterrupt(), 130, "the profile of before stays in force"),
        (
            quiet_or_not(4, disturbed=4),
            None,
            1,
            "nothing trustworthy was measured: meanwhile others use 2.0 of 2 cores",
        ),
    ],
)
def test_a_finding_shows_what_is_in_force(run, monkeypatch, found, error, status, told):
    def measured(*args, **kwargs):
        store.save(dispatch.session().settings, found)
        dispatch.session().adopt(found)
        if error:
            raise error
        return found

    busy(2.0)
    monkeypatch.setattr(commands_measured.evaluation, "calibrate", measured)
    result = run("calibrate", "--json", "--budget", "4")
    assert (result.exit_code, json.loads(result.stdout)["ops"][0]["problems"]) == (status, 4)
    assert told in result.stderr
    assert "others use 2.0 of 2 cores; measuring with what is free" in result.stderr


NEW, FEW, MANY, WORSE = Profile(), quiet_or_not(3), quiet_or_not(9, disturbed=3), quiet_or_not(9, disturbed=4)


@pytest.mark.parametrize(
    ("before", "after", "ops", "others", "trusted", "told"),
    [
        (NEW, WORSE, None, 0.1, True, ""),
        (FEW, MANY, None, 1.9, True, "meanwhile others use 1.9 of 2 cores: 9 problems measured, 3 disturbed"),
        (NEW, WORSE, None, 1.9, False, "nothing trustworthy was measured: meanwhile others use 1.9 of 2 cores"),
        (MANY, MANY, ["qr"], 1.9, True, "meanwhile"),  # nothing was left to measure
        (WORSE, WORSE, ["qr"], 1.9, False, "nothing trustworthy"),
        (NEW, MANY, ["cholesky"], 1.9, False, "nothing trustworthy"),
    ],
)
def test_verdicts(monkeypatch, before, after, ops, others, trusted, told):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    words, found = commands_measured.verdict(before, after, ops, Load(2, others))
    assert (found, words[: len(told)], bool(words)) == (trusted, told, bool(told))


def test_an_exported_file_can_be_pinned_elsewhere_and_names_no_machine_no_user_no_path(
    run, profile, tmp_path, monkeypatch
):
    where, file = f"/home/{getpass.getuser()}/bin/g++ on {platform.node()} failed", tmp_path / "mine.json"
    formerly = msgspec.structs.replace(profile, tools={"keops": where})  # what a former version kept
    kept = store.save(dispatch.session().settings, formerly)
    assert where not in kept.read_text()
    kept.write_bytes(msgspec.json.encode(formerly))
    assert run("profile", "export", file).exit_code == 0
    text = file.read_text()
    for secret in (platform.node(), f"/{getpass.getuser()}", str(tmp_path), str(Path.home()), "g++", "fruitless"):
        assert len(secret) < 3 or secret not in text
    assert next(iter(json.loads(text))) == "schema"
    assert set(json.loads(text)["host"]) == {"system", "versions", "cpu", "accelerators", "remarks"}
    found = msgspec.structs.replace(store.read_file(file), forests={})
    assert found == msgspec.structs.replace(profile, fruitless={})
    monkeypatch.setenv("AUTOKERN_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("AUTOKERN_PROFILE", str(file))
    assert f"pinned by AUTOKERN_PROFILE:\n{file}" in run("show", "qr").output
    assert not (tmp_path / "none").exists(), "nothing is written"
