"""The logic of `calibration/end_to_end.py` on tiny sizes: structure of the figures, data, tables; never a timing."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn", reason="needs scikit-learn for the diabetes data")
pytest.importorskip("statsmodels", reason="needs statsmodels for the CO2 series")

FOLDER = Path(__file__).parents[1] / "calibration"
NULL = {"off": contextlib.nullcontext, "on": contextlib.nullcontext}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    names = ("figures", "workloads", "end_to_end")
    known = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # linear_operator scripts functions when it is imported
        modules = [load(name) for name in names]
    yield modules[-1]
    for name in names:
        del sys.modules[name]
    sys.modules.update(known)


@pytest.fixture(scope="module")
def results(script: ModuleType) -> dict[str, Any]:
    scale = script.Scale(steps=3, last=112, sizes=(40, 60), solves=3, warmup=1)
    said: list[str] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # at these sizes threads only wait for each other, and long where tests share cores
    try:
        figures = {name: run(scale, NULL, said.append) for name, run in script.WORKLOADS.items()}
    finally:
        torch.set_num_threads(threads)
    assert len(said) == 4 + 1 + 4
    return {**script.describe({}, quick=True), **figures, "calls": {}}


@pytest.fixture
def written(script: ModuleType, results: dict[str, Any], tmp_path: Path) -> Path:
    script.figures.write(results, tmp_path)
    return tmp_path


def assert_compared(figure: dict[str, Any], pairs: int) -> None:
    assert figure["pairs"] == pairs
    assert min(figure["off"], figure["on"]) > 0
    low, high = figure["quartiles"]
    assert 0 < low <= figure["ratio"] <= high


# data


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_diabetes_is_whole_and_standardised(script: ModuleType, dtype: torch.dtype) -> None:
    x, y = sys.modules["workloads"].diabetes_data(dtype)
    assert x.shape == (442, 10)
    assert y.shape == (442,)
    assert x.dtype == y.dtype == dtype
    torch.testing.assert_close(x.std(0), torch.ones(10, dtype=dtype))


def test_co2_is_long_enough_regular_and_complete(script: ModuleType) -> None:
    x, y = script.co2_data()
    assert len(x) == len(y) >= script.FULL.last + script.FORECAST
    assert y.isfinite().all()
    torch.testing.assert_close(x.diff(dim=0), x.diff(dim=0)[:1].expand(len(x) - 1, 1))


# measuring


def test_sides_take_turns_and_the_first_alternates(script: ModuleType) -> None:
    calls: list[str] = []
    entered: list[str] = []

    def toggle(side: str) -> Any:
        entered.append(side)
        return contextlib.nullcontext()

    toggles = {side: lambda side=side: toggle(side) for side in script.SIDES}
    steps = {side: lambda side=side: calls.append(side) for side in script.SIDES}
    seconds = script.interleave(toggles, steps, rounds=2, warmup=1, after=lambda: calls.append("after"))
    assert calls == ["off", "on", "after", "on", "off", "after", "off", "on", "after"]
    assert entered == [call for call in calls if call != "after"]
    assert [len(seconds[side]) for side in script.SIDES] == [2, 2]


def test_collector_is_restored_when_a_step_fails(script: ModuleType) -> None:
    def fail() -> None:
        raise RuntimeError("step")

    with pytest.raises(RuntimeError, match="step"):
        script.interleave(NULL, {"off": fail, "on": fail}, rounds=1)
    assert script.gc.isenabled()


def test_ratios_are_of_pairs_and_not_of_medians(script: ModuleType) -> None:
    figure = script.compare({"off": [1.0, 10.0, 100.0], "on": [0.5, 10.0, 25.0]})
    assert figure["off"] / figure["on"] == 1.0
    assert figure["ratio"] == 2.0
    assert figure["quartiles"] == [1.5, 3.0]


def test_window_is_cut_at_both_ends_of_the_stream(script: ModuleType) -> None:
    ticks = [float(n) for n in range(script.START, script.START + 50)]
    seconds = {"off": ticks, "on": ticks}
    assert script.around(seconds, script.START)["off"] == script.START + 6
    assert script.around(seconds, script.START + 30)["off"] == script.START + 30
    assert script.around(seconds, script.START + 50)["pairs"] == 12


# figures


def test_training_gives_the_same_numbers_twice(results: dict[str, Any]) -> None:
    figures = results["diabetes"]
    assert (figures["n"], figures["d"], figures["steps"]) == (442, 10, 4)
    assert {(case["kernel"], case["dtype"]) for case in figures["cases"]} == {
        (kernel, dtype) for kernel in ("rbf", "matern52") for dtype in ("float32", "float64")
    }
    for case in figures["cases"]:
        assert_compared(case, 3)
        assert case["loss_difference"] <= 1e-6
        assert case["relative_hyperparameter_difference"] <= 1e-4


def test_stream_agrees_with_a_refit(results: dict[str, Any]) -> None:
    figures = results["co2"]
    assert (figures["start"], figures["last"]) == (100, 112)
    assert [len(figures["seconds"][side]) for side in ("off", "on")] == [12, 12]
    (check,) = figures["checks"]
    assert check["n"] == 112
    for name in ("off", "on", "default_refit"):
        assert max(check[name].values()) <= 1e-9
    for mark in figures["at"]:
        assert_compared(mark, mark["pairs"])
    assert 0 < figures["resident_bytes"]["last"] <= figures["resident_bytes"]["peak"]


def test_an_update_drops_the_old_model_once_garbage_is_collected(script: ModuleType) -> None:
    x, y = script.co2_data()
    state = script.co2_hyperparameters(x[:20], y[:20], steps=1)
    stream = script.Stream(x, y, state, 20)
    old = weakref.ref(stream.model)
    stream()
    script.gc.collect()
    assert old() is None
    assert stream.model.train_inputs[0].shape == (21, 1)


def test_conjugate_gradients_of_both_sides_agree(results: dict[str, Any]) -> None:
    figures = results["cg"]
    assert {(case["n"], case["dtype"]) for case in figures["cases"]} == {
        (n, dtype) for n in (40, 60) for dtype in ("float32", "float64")
    }
    for case in figures["cases"]:
        assert_compared(case, 3)
        assert case["difference"] <= 1e-4
        assert case["residual"]["off"] < 1
    assert figures["geomean"] > 0


# tables and files


def test_json_round_trips_with_short_lists_on_one_line(written: Path, results: dict[str, Any]) -> None:
    text = (written / "end_to_end.json").read_text(encoding="utf-8")
    read = json.loads(text)
    assert read.keys() == results.keys()
    assert read["co2"]["seconds"]["on"] == pytest.approx(results["co2"]["seconds"]["on"], rel=1e-5)
    assert any(line.count(",") >= 11 for line in text.splitlines())
    assert (written / "co2.png").read_bytes().startswith(b"\x89PNG")


def test_readme_block_is_rewritten_and_then_passes_the_check(script: ModuleType, written: Path) -> None:
    readme = written / "README.md"
    readme.write_text("before\n<!-- figures:begin -->\nold\n<!-- figures:end -->\nafter\n", encoding="utf-8")
    folder = ["--output-dir", str(written)]
    assert script.main(["--check", str(readme), *folder]) == 1
    assert script.main(["--readme", str(readme), *folder]) == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- figures:begin -->\n| ")
    assert text.endswith("<!-- figures:end -->\nafter\n")
    assert "old" not in text.split("figures:begin")[1].split("figures:end")[0].split()
    assert script.main(["--check", str(readme), *folder]) == 0
    readme.write_text(text.replace("float64", "float63", 1), encoding="utf-8")
    assert script.main(["--check", str(readme), *folder]) == 1


@pytest.mark.parametrize("text", ["", "<!-- figures:begin -->", "<!-- figures:end --> <!-- figures:begin -->"])
def test_readme_without_a_place_is_bad_usage(script: ModuleType, written: Path, text: str) -> None:
    readme = written / "README.md"
    readme.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        script.main(["--readme", str(readme), "--output-dir", str(written)])
    assert stop.value.code == 2
    assert readme.read_text(encoding="utf-8") == text


def test_missing_figures_are_bad_usage(script: ModuleType, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- figures:begin -->\n<!-- figures:end -->\n", encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        script.main(["--check", str(readme), "--output-dir", str(tmp_path)])
    assert stop.value.code == 2


def test_unknown_workload_is_bad_usage(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        script.main(["c02"])
    assert stop.value.code == 2
    assert "diabetes, co2, cg" in capsys.readouterr().err


def test_markdown_holds_headlines_and_has_even_rows(script: ModuleType, results: dict[str, Any]) -> None:
    table = script.figures.markdown_table(results).split("\n\n")[0].splitlines()
    assert len({line.count("|") for line in table}) == 1
    assert len(table) == 2 + 4 + 2 + 2
    assert all("n = 40," not in line for line in table)


def test_a_run_of_one_workload_has_a_table_too(script: ModuleType, results: dict[str, Any]) -> None:
    alone = {name: value for name, value in results.items() if name not in ("co2", "diabetes")}
    assert len(script.figures.markdown_table(alone).split("\n\n")[0].splitlines()) == 2 + 2
    script.figures.show(alone)
    script.figures.show(results)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(123.4, "123 s"), (1.0, "1.00 s"), (0.0426, "42.6 ms"), (0.00176, "1.76 ms"), (2.5e-6, "2.50 µs")],
)
def test_durations_have_three_digits_and_a_unit(script: ModuleType, seconds: float, text: str) -> None:
    assert script.figures.duration(seconds) == text


def test_figures_from_elsewhere_become_plain_json(script: ModuleType) -> None:
    value = script.figures.plain({("qr", "cpu"): (3, torch.float32)})
    assert value == {"('qr', 'cpu')": [3, "torch.float32"]}
