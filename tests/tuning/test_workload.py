"""Workloads: what a file holds, what is refused, sums of recordings, weights; a calibration that measures them."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import autokern
from autokern.core.errors import AutokernWarning, ProfileError, SettingsError
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.runtime import dispatch
from autokern.system.files import LARGEST
from autokern.tuning import workload
from autokern.tuning.calibration import calibrate
from autokern.tuning.profile import Profile
from autokern.tuning.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

QR = Problem(op="qr", m=500, n=50)
KERNEL = Problem(op="kernel_matrix", m=30, n=20, d=2, dtype="float32", grad="theta", variant="rbf/cross/ard")
SOME = Workload({QR: 3, QR.replace(n=49): 1, KERNEL: 7}, 2)


def test_a_text_holds_a_workload():
    data = workload.encode(SOME)
    assert workload.decode(data) == SOME
    again = Workload({problem: SOME.calls[problem] for problem in reversed(SOME.calls)}, 2)
    assert workload.encode(again) == data
    assert data.count(b"\n") == 4, "problems that differ in sizes only have one line"
    assert workload.decode(b" \n") == Workload()


def test_workloads_add_up(tmp_path):
    path = tmp_path / "asked.json"
    assert workload.add(path, Workload()) == Workload()
    assert workload.add(path, SOME) == SOME
    whole = workload.add(path, Workload({QR: 1, Problem(op="foreign"): 2}, 1))
    assert whole.calls == {**SOME.calls, QR: 4, Problem(op="foreign"): 2}
    assert whole.recordings == 3
    assert workload.read(path) == whole
    assert os.listdir(tmp_path) == ["asked.json"], "nothing else is left"


def test_many_writers_lose_nothing(tmp_path):
    path, writers = tmp_path / "asked.json", 12
    begin = threading.Barrier(writers)

    def write(number):
        begin.wait()
        workload.add(path, Workload({QR: 1, QR.replace(n=number + 1): 1}, 1))

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(write, range(writers)))
    assert workload.read(path) == Workload({QR: writers, **{QR.replace(n=n + 1): 1 for n in range(writers)}}, writers)


def test_a_writer_that_keeps_its_lock_does_not_stop_others(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "asked.json"
    workload.add(path, SOME)
    with path.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert workload.add(path, SOME, patience=0.05).recordings == 4


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    link, target = tmp_path / "link.json", tmp_path / "folder" / "asked.json"
    target.parent.mkdir()
    link.symlink_to(target)
    workload.add(link, SOME)
    assert link.is_symlink()
    assert workload.read(target) == SOME


BAD = [
    (b"no json", "no workload"),
    (b'{"schema": 1, "trials": []}', "no file that"),
    (b'{"autokern":"workload","schema":2,"whatever":1}', "a newer autokern wrote it"),
    (b'{"autokern":"workload","schema":1,"recordings":1,"asked":[{"op":"qr","sizes":[[0,1,0,0,1,1]]}]}', "impossible"),
    (b'{"autokern":"workload","schema":1,"recordings":1,"asked":[{"op":"qr","sizes":[[1,1,0,0,1,0]]}]}', "schema 1"),
    (b'{"autokern":"workload","schema":1,"recordings":1,"asked":[{"op":"qr","sizes":[[1,1]]}]}', "schema 1"),
    (b'{"autokern":"workload","schema":1,"recordings":1,"asked":[{"op":"qr","sizes":[],"more":1}]}', "schema 1"),
    (b"\xff\xfe", "no workload"),
    (b"[" * 100_000, "no workload"),
]


@pytest.mark.parametrize(("data", "words"), BAD)
def test_what_is_no_workload_is_refused_and_stays(tmp_path, data, words):
    path = tmp_path / "asked.json"
    path.write_bytes(data)
    with pytest.raises(ProfileError, match=words):
        workload.read(path)
    with pytest.raises(ProfileError, match=words):
        workload.add(path, SOME)
    assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["asked.json"]


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "none" / "asked.json"):
        with pytest.raises(ProfileError, match="asked for the workload in"):
            workload.read(path)
    for path in (tmp_path, tmp_path / "none" / "asked.json", "/dev/null"):
        with pytest.raises(ProfileError, match="asked to record in"):
            workload.add(path, SOME)
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(ProfileError, match="larger than"):
        workload.read(large)


def test_very_many_problems_become_fewer(monkeypatch):
    monkeypatch.setattr(workload, "MOST", 100)
    many = Workload({QR.replace(m=m): 1 for m in range(1000, 1101)}, 1)
    assert len(many.merge(Workload()).calls) < 20
    assert sum(many.merge(Workload()).calls.values()) == 101
    scattered = Workload({QR.replace(m=2**k, n=2**j): 1 for k in range(20) for j in range(20)}, 1)
    assert len(scattered.merge(Workload()).calls) == 50


def test_weights_are_calls_times_stocks_time_and_one_stands_for_its_neighbours():
    big, near, often = QR.replace(m=5000, n=300), QR.replace(m=5001, n=300), QR.replace(m=20, n=10)
    asked = Workload({often: 1000, near: 1, big: 2, KERNEL: 9}, 1)
    weights = asked.weights(get("qr"), "float64", "cpu")
    assert list(weights) == [big, often, near]
    assert Workload({big: 3}).weights(get("qr"), "float64", "cpu")[big] == pytest.approx(weights[big])
    assert list(asked.weights(get("kernel_matrix"), "float32", "cpu")) == [KERNEL]
    assert asked.weights(get("kernel_matrix"), "float64", "cpu") == {}


def test_what_cannot_be_measured_here_is_left_out():
    alien = KERNEL.replace(variant="quantum/same/ard")
    calls = {QR: 1, Problem(op="foreign"): 1, QR.replace(device="xyz"): 1, QR.replace(dtype="float16"): 1, alien: 1}
    found, told = workload.served(Workload(calls), ["cpu"])
    assert QR in found.calls
    assert not {Problem(op="foreign"), QR.replace(device="xyz"), QR.replace(dtype="float16")} & found.calls.keys()
    assert "1 of foreign" in told
    assert "1 on xyz" in told
    assert workload.served(Workload({QR: 1}), ["cpu"]) == (Workload({QR: 1}), "")


def test_a_calibration_measures_the_problems_of_a_workload_and_no_others():
    asked = Workload({QR.replace(m=60, n=7): 5, QR.replace(m=61, n=7): 2, Problem(op="matmul", m=33, n=9, rhs=4): 1})
    ops = [get("qr"), get("matmul"), get("eigh")]
    found = calibrate(ops, "quick", 5.0, ["cpu"], Profile(), workload=asked)
    assert {trial.problem for trial in found.trials} == set(asked.calls)
    assert found.levels == found.fruitless == {}, "neither op has been measured as a whole, nor in vain"


def test_the_weightiest_problem_is_measured_first():
    light, heavy = QR.replace(m=30, n=3), Problem(op="matmul", m=300, n=300, rhs=40)
    found = calibrate(
        [get("qr"), get("matmul")], "quick", 5.0, ["cpu"], Profile(), workload=Workload({light: 1, heavy: 900})
    )
    assert [trial.problem for trial in found.trials] == [heavy, light]
    known = calibrate([get("matmul")], "quick", 5.0, ["cpu"], Profile(), workload=Workload({heavy: 1}))
    begun = []
    calibrate(
        [get("qr"), get("matmul")],
        "quick",
        5.0,
        ["cpu"],
        known,
        workload=Workload({light: 1, heavy: 900}),
        progress=lambda fraction, text: begun.append(text),
    )
    assert begun == [str(light), "done"], "what is measured already is not measured again"


def test_calibrate_takes_a_file_and_explain_says_measured(tmp_path):
    path, problem = tmp_path / "asked.json", QR.replace(m=77, n=13)
    workload.add(path, Workload({problem: 4, Problem(op="foreign"): 1, KERNEL.replace(device="xyz"): 1}, 1))
    with pytest.warns(AutokernWarning, match="left out: 1 of foreign.*1 on xyz"):
        profile = autokern.calibrate(budget=3.0, progress=False, workload=path)
    assert [trial.problem for trial in profile.trials] == [problem]
    assert dispatch.explain(problem).source == "measured"


def test_calibrate_refuses_a_workload_without_anything_to_measure(tmp_path):
    path = tmp_path / "asked.json"
    workload.add(path, Workload({QR: 4}, 1))
    with pytest.raises(SettingsError, match="no problem of eigh"):
        autokern.calibrate(["eigh"], budget=1.0, progress=False, workload=str(path))
    with pytest.raises(ProfileError, match=r"none\.json"):
        autokern.calibrate(budget=1.0, progress=False, workload=tmp_path / "none.json")


def test_calibrate_tells_what_the_budget_did_not_allow():
    huge = QR.replace(m=200_000, n=500)
    with pytest.warns(AutokernWarning, match="1 of 2 problems of the workload are not measured, nor"):
        autokern.calibrate(budget=2.0, progress=False, workload=Workload({huge: 1, QR.replace(m=60, n=7): 1}))


def test_a_problem_without_a_sample_is_skipped():
    asked = Workload({Problem(op="objective", m=20, n=20, d=2, variant="alien"): 1, QR.replace(m=60, n=7): 1})
    found = calibrate([get("objective"), get("qr")], "quick", 3.0, ["cpu"], Profile(), workload=asked)
    assert [trial.problem.op for trial in found.trials] == ["qr"]


def test_a_periodic_kernel_without_ard_has_a_sample():
    asked = Problem(op="kernel_matrix", m=9, n=7, d=2, variant="periodic/cross/iso")
    args = get("kernel_matrix").sample(asked, torch.Generator().manual_seed(1))
    assert get("kernel_matrix").problem_of(*args) == asked
