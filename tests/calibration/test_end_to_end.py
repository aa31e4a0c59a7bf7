"""The logic of `calibration/end_to_end.py` on tiny sizes: structure of the figures, data, tables; never a timing."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import gpytorch
import pytest
import torch

pytest.importorskip("sklearn", reason="needs scikit-learn for the diabetes data")
pytest.importorskip("statsmodels", reason="needs statsmodels for the CO2 series")

pytestmark = pytest.mark.slow
NULL = {"off": contextlib.nullcontext, "on": contextlib.nullcontext}
WORKLOADS = (
    "training", "jump", "diabetes", "processes", "memory", "posterior", "points", "fantasies", "stream", "co2", "cg",
    "matrixfree", "refusal", "elevation", "acquisition",
)  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("end_to_end")


def tiny(script: ModuleType) -> Any:
    return script.Scale(
        steps=3, warmup=1, last=112, sizes=(40, 60), solves=3, training=(100,), floor=100, seconds=0.0, rounds=(2, 9),
        edge=(20, 21), edge_steps=3, contended=(20,), processes=(1,),
        settle=0.0, window=0.05, windows=2, dropped=6, settling=2, posterior=(30,), predictions=2, points=(300,),
        repeats=1, fantasies=(30,), updates=2, successive=3, streamed=110, dropped_updates=60, acquired=20,
        restarts=(1,), evaluations=2, free=(48, 8, 3), free_compared=50, terrain=60, terrain_steps=1,
        terrain_part=(30, 2),
    )  # fmt: skip


def here(module: str, function: str, *arguments: Any, **options: Any) -> Any:
    """Do in this process what is meant for a fresh one."""
    import autokern

    depth = autokern.hooks.install._depth
    try:
        return getattr(sys.modules[module], function)(*arguments)
    finally:
        while autokern.hooks.install._depth > depth:
            autokern.disable()


@pytest.fixture(scope="module")
def results(script: ModuleType) -> dict[str, Any]:
    said: list[str] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # at these sizes threads only wait for each other, and long where tests share cores
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(gpytorch.settings.fast_computations())  # BoTorch changes both
            stack.enter_context(gpytorch.settings.max_cholesky_size(800))
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for name in ("matrixfree", "elevation"):
                patch.setattr(sys.modules[name], "in_child", here)
            figures = {name: run(tiny(script), NULL, said.append) for name, run in script.WORKLOADS.items()}
    finally:
        torch.set_num_threads(threads)
    assert len(said) == 4 + 4 + 4 + (1 + 1) + 1 + (4 + 1 + 2 + 1) + 1 + 4 + (1 + 6) + 1 + 1 + 2
    described = script.describe({}, quick=True)
    return {**described, **{name: {"run": script.stamp(described), **figure} for name, figure in figures.items()}}


@pytest.fixture
def written(script: ModuleType, results: dict[str, Any], tmp_path: Path) -> Path:
    script.figures.write(results, tmp_path)
    return tmp_path


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


def test_three_sides_take_turns_in_all_orders(script: ModuleType) -> None:
    orders = list(sys.modules["measuring"].turns("abc", 12))
    assert len(set(orders)) == 6
    assert orders[:6] == orders[6:]
    for place in range(3):
        assert sorted(order[place] for order in orders) == sorted("abc" * 4)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 3), (1e9, 7)])
def test_rounds_end_when_the_time_is_over_but_not_before_the_least(
    script: ModuleType, seconds: float, rounds: int
) -> None:
    taken = script.interleave(NULL, {"off": lambda: None, "on": lambda: None}, 7, warmup=2, seconds=seconds, least=3)
    assert [len(taken[side]) for side in script.SIDES] == [rounds, rounds]


def test_ratios_are_of_pairs_and_not_of_medians(script: ModuleType) -> None:
    figure = script.compare({"off": [1.0, 10.0, 100.0], "on": [0.5, 10.0, 25.0]})
    assert figure["off"] / figure["on"] == 1.0
    assert figure["ratio"] == 2.0
    assert figure["quartiles"] == [1.5, 3.0]
    assert script.compare({"exact": [4.0], "on": [2.0], "default": [3.0]}, off="exact")["ratio"] == 2.0


# figures


def compared(figures: Any) -> Iterator[dict[str, Any]]:
    """All comparisons of two sides within figures."""
    inner = figures.values() if isinstance(figures, dict) else figures if isinstance(figures, list) else ()
    if isinstance(figures, dict) and "quartiles" in figures:
        yield figures
    for one in inner:
        yield from compared(one)


def test_comparisons_have_times_and_ratios_within_their_quartiles(results: dict[str, Any]) -> None:
    found = list(compared(results))
    assert len(found) > 30
    for figure in found:
        low, high = figure["quartiles"]
        assert 0 < low <= figure["ratio"] <= high
        assert min(figure.get("off", 1), figure.get("on", 1)) > 0


DTYPES = ("float32", "float64")
TRAINED = set(product(("rbf", "matern52"), DTYPES))
CASES = [
    ("diabetes", ("kernel", "dtype"), TRAINED),
    ("training", ("kernel", "dtype", "n"), {(*one, 100) for one in TRAINED}),
    ("jump", ("dtype", "n"), set(product(DTYPES, (20, 21)))),
    ("cg", ("n", "dtype"), set(product((40, 60), DTYPES))),
    ("posterior", ("fast", "first"), set(product((False, True), repeat=2))),
    ("processes", ("processes", "n"), {(1, 20)}),
    ("acquisition", ("function",), {("qKG",), ("qEI",)}),
]


@pytest.mark.parametrize(("name", "fields", "expected"), CASES)
def test_a_workload_has_a_figure_for_each_case(
    results: dict[str, Any], name: str, fields: tuple[str, ...], expected: set[Any]
) -> None:
    assert {tuple(case[field] for field in fields) for case in results[name]["cases"]} == expected


def test_both_sides_compute_the_same(results: dict[str, Any]) -> None:
    for case in results["diabetes"]["cases"]:
        assert case["loss_difference"] <= 1e-6
        assert case["relative_hyperparameter_difference"] <= 1e-4
    for case in results["training"]["cases"]:
        assert case["agreement"]["default"] == {"loss": 0, "gradient": 0}
    for case in results["jump"]["cases"]:
        for side in ("off", "on"):
            assert max(case["error"][side].values()) <= (1e-3 if case["dtype"] == "float32" else 0)
        assert case["loss"]["off"] == pytest.approx(case["loss"]["truth"], rel=1e-3)
        assert case["gradient_norm"]["on"] == pytest.approx(case["gradient_norm"]["truth"], rel=1e-3)
    assert [case["factorisations"]["off"] for case in results["posterior"]["cases"]] == [2, 1, 2, 0]
    assert results["points"]["cases"][0]["sides"]["on"][0]["error"] < 1e-12
    assert all(max(case["error"]["on"].values()) < 1e-10 for case in results["fantasies"]["cases"])
    assert max(results["fantasies"]["successive"]["error"].values()) < 1e-10
    (check,) = results["co2"]["checks"]
    assert max(max(check[name].values()) for name in ("off", "on", "default_refit")) <= 1e-9
    assert all(case["difference"] <= 1e-4 and case["residual"]["off"] < 1 for case in results["cg"]["cases"])
    assert max(case["gradient"] for case in results["matrixfree"]["cases"]) < 1e-3


def test_the_terrain_is_split_and_learned(script: ModuleType, results: dict[str, Any]) -> None:
    of, figures = sys.modules["elevation"].terrain(), results["elevation"]
    assert (len(of.held_x), len(of.x)) == (57 * 67, 344 * 403 - 57 * 67)
    assert not {tuple(place) for place in of.held_x.tolist()} & {tuple(place) for place in of.x[:2000].tolist()}
    rmse = figures["child"]["rmse"]
    assert rmse["all"] < rmse["trivial"]
    assert figures["stock"]["rmse"]["all"] == pytest.approx(rmse["all"], rel=0.1)
    stopped = {"training_seconds": 250.0, "steps": 2, "bytes": 1}
    for stock, told in (
        (stopped, "> 250 s, after 2 steps"),
        ({"failed": "not done after 420 s", "limit": 420.0}, "> 420 s"),
        ({"failed": "no memory", "limit": 420.0}, "needs"),
    ):
        assert next(sys.modules["rows"].elevation_rows({**figures, "stock": stock})).off.startswith(told)


@pytest.mark.parametrize("name", ["matrixfree", "refusal", "elevation"])
def test_failed_children_have_rows_too(script: ModuleType, results: dict[str, Any], name: str) -> None:
    failed = {**results[name], "child": {"failed": "not done after 1 s"}}
    first = next(sys.modules["rows"].rows({name: failed}))
    assert first.agreement == "not done after 1 s"
    assert not first.headline


# fresh processes


def test_a_function_runs_in_a_fresh_process_or_the_reason_is_told(script: ModuleType) -> None:
    in_child = sys.modules["children"].in_child
    assert in_child("json", "loads", '{"a": 1}') == {"a": 1}
    assert "JSONDecodeError" in in_child("json", "loads", "{")["failed"]
    assert in_child("time", "sleep", 9, limit=0.2) == {"failed": "not done after 0.2 s"}


# tables and files


def test_json_round_trips_with_short_lists_on_one_line(written: Path, results: dict[str, Any]) -> None:
    text = (written / "end_to_end.json").read_text(encoding="utf-8")
    read = json.loads(text)
    assert read.keys() == results.keys()
    assert read["co2"]["seconds"]["on"] == pytest.approx(results["co2"]["seconds"]["on"], rel=1e-5)
    assert any(line.count(",") >= 11 for line in text.splitlines())
    for name in ("co2.png", "elevation.png"):
        assert (written / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("what", ["versions", "quick"])
def test_figures_of_other_versions_are_not_mixed_in(script: ModuleType, results: dict[str, Any], what: str) -> None:
    said: list[str] = []
    earlier = copy.deepcopy(results)
    earlier[what] = None
    assert script.kept(earlier, results, ["co2"], said.append) == {}
    assert len(said) == 1
    assert "cg" in said[0]
    assert said[0].endswith(f"other {what} than in this run")
    assert script.kept(earlier, results, WORKLOADS, said.append) == {}
    assert len(said) == 1


def test_partial_runs_add_up_in_the_file(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: dict[str, Any]
) -> None:
    import autokern

    monkeypatch.setattr(autokern, "calibrate", lambda **options: None)
    ready = {name: lambda scale, toggles, report, name=name: dict(results[name]) for name in WORKLOADS}
    monkeypatch.setattr(script, "WORKLOADS", {**ready, "acquisition": lambda *_: {}})
    for names in (["cg", "jump"], ["memory", "acquisition"]):
        assert script.main([*names, "--output-dir", str(tmp_path)]) == 0
    read = script.figures.read(tmp_path)
    assert [name for name in read if name in WORKLOADS] == ["jump", "memory", "cg"]
    (tmp_path / "end_to_end.json").write_text("{", encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        script.main(["cg", "--output-dir", str(tmp_path)])
    assert stop.value.code == 2


def test_markdown_holds_headlines_and_has_even_rows(script: ModuleType, results: dict[str, Any]) -> None:
    table = script.figures.markdown_table(results).split("\n\n")[0].splitlines()
    assert len({line.count("|") for line in table}) == 1
    assert len(table) == 2 + 6  # training, test points, the CO₂ stream, CG, no matrix, the terrain
    assert sum("n = 100," in line for line in table) == 1
    assert all("n = 40," not in line for line in table)


WRITTEN = [
    ("duration", {123.4: "123 s", 1.0: "1.00 s", 0.0426: "42.6 ms", 0.00176: "1.76 ms", 2.5e-6: "2.50 µs"}),
    ("per_second", {1234.5: "1,234/s", 99.4: "99.4/s", 0.123: "0.123/s"}),
    ("small", {None: "nan", float("nan"): "nan", 0.0: "0", 2e-5: "2e-05"}),
]


@pytest.mark.parametrize(("function", "table"), WRITTEN)
def test_numbers_have_few_digits_and_a_unit(script: ModuleType, function: str, table: dict[float, str]) -> None:
    write = getattr(sys.modules["rows"], function)
    assert [write(value) for value in table] == list(table.values())
