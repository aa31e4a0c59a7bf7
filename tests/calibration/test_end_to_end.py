"""The logic of `calibration/end_to_end.py` on tiny sizes: structure of the figures, data, tables; never a timing."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import gpytorch
import pytest

import autokern

pytest.importorskip("sklearn", reason="needs scikit-learn for the diabetes data")
pytest.importorskip("statsmodels", reason="needs statsmodels for the CO2 series")

import children
import elevation
import end_to_end as script
import matrixfree
import measuring
import rows

pytestmark = pytest.mark.slow
WORKLOADS = tuple(script.WORKLOADS)
NULL = {"off": contextlib.nullcontext, "on": contextlib.nullcontext}
TINY = script.Scale(
    steps=3, warmup=1, last=112, sizes=(40, 60), solves=3, training=(100,), floor=100, seconds=0.0, rounds=(2, 9),
    edge=(20, 21), edge_steps=3, contended=(20,), processes=(1,),
    settle=0.0, window=0.05, windows=2, dropped=6, settling=2, posterior=(30,), predictions=2, points=(300,),
    repeats=1, fantasies=(30,), updates=2, successive=3, streamed=110, dropped_updates=60, acquired=20,
    restarts=(1,), evaluations=2, free=(48, 8, 3), free_compared=50, terrain=60, terrain_steps=1,
    terrain_part=(30, 2),
)  # fmt: skip


def here(module: str, function: str, *arguments: Any, **options: Any) -> Any:
    """Do in this process what is meant for a fresh one."""
    depth = autokern.hooks.install._depth
    try:
        return getattr(sys.modules[module], function)(*arguments)
    finally:
        while autokern.hooks.install._depth > depth:
            autokern.disable()


@pytest.fixture(scope="module")
def results(one_thread):
    said: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(gpytorch.settings.fast_computations())  # BoTorch changes both
        stack.enter_context(gpytorch.settings.max_cholesky_size(800))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for module in (matrixfree, elevation):
            patch.setattr(module, "in_child", here)
        figures = {name: run(TINY, NULL, said.append) for name, run in script.WORKLOADS.items()}
    assert len(said) == 4 + 4 + 4 + (1 + 1) + 1 + (4 + 1 + 2 + 1) + 1 + 4 + (1 + 6) + 1 + 1 + 2
    described = script.describe({}, quick=True)
    return {**described, **{name: {"run": script.stamp(described), **figure} for name, figure in figures.items()}}


def test_sides_take_turns_and_the_first_alternates():
    calls: list[str] = []
    toggles = {side: lambda side=side: contextlib.nullcontext(calls.append(f"as {side}")) for side in script.SIDES}
    steps = {side: lambda side=side: calls.append(side) for side in script.SIDES}
    seconds = script.interleave(toggles, steps, rounds=2, warmup=1, after=lambda: calls.append("after"))
    off, on = ["as off", "off"], ["as on", "on"]
    assert calls == [*off, *on, "after", *on, *off, "after", *off, *on, "after"]
    assert [len(seconds[side]) for side in script.SIDES] == [2, 2]


def test_three_sides_take_turns_in_all_orders():
    orders = list(measuring.turns("abc", 12))
    assert len(set(orders)) == 6
    assert orders[:6] == orders[6:]
    for place in range(3):
        assert sorted(order[place] for order in orders) == sorted("abc" * 4)


def test_rounds_end_when_the_time_is_over_but_not_before_the_least():
    for seconds, rounds in ((0.0, 3), (1e9, 7)):
        taken = script.interleave(NULL, dict.fromkeys(NULL, lambda: None), 7, warmup=2, seconds=seconds, least=3)
        assert [len(taken[side]) for side in script.SIDES] == [rounds, rounds]


def test_ratios_are_of_pairs_and_not_of_medians():
    figure = script.compare({"off": [1.0, 10.0, 100.0], "on": [0.5, 10.0, 25.0]})
    assert figure["off"] / figure["on"] == 1.0
    assert figure["ratio"] == 2.0
    assert figure["quartiles"] == [1.5, 3.0]
    assert script.compare({"exact": [4.0], "on": [2.0], "default": [3.0]}, off="exact")["ratio"] == 2.0


def compared(figures: Any) -> Iterator[dict[str, Any]]:
    """All comparisons of two sides within figures."""
    if isinstance(figures, dict) and "quartiles" in figures:
        yield figures
    for one in figures.values() if isinstance(figures, dict) else figures if isinstance(figures, list) else ():
        yield from compared(one)


def test_comparisons_have_times_and_ratios_within_their_quartiles(results):
    found = list(compared(results))
    assert len(found) > 30
    for figure in found:
        low, high = figure["quartiles"]
        assert 0 < low <= figure["ratio"] <= high
        assert min(figure.get("off", 1), figure.get("on", 1)) > 0


def test_both_sides_compute_the_same(results):
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


def test_the_terrain_is_split_and_learned(results):
    of, figures = elevation.terrain(), results["elevation"]
    assert (len(of.held_x), len(of.x)) == (57 * 67, 344 * 403 - 57 * 67)
    assert not {tuple(place) for place in of.held_x.tolist()} & {tuple(place) for place in of.x[:2000].tolist()}
    rmse = figures["child"]["rmse"]
    assert rmse["all"] < rmse["trivial"]
    assert figures["stock"]["rmse"]["all"] == pytest.approx(rmse["all"], rel=0.1)


FAILED = [
    (name, {"child": {"failed": "not done after 1 s"}}, "agreement", "not done after 1 s")
    for name in ("matrixfree", "refusal", "elevation")
]
STOPPED = [
    ({"training_seconds": 250.0, "steps": 2, "bytes": 1}, "> 250 s, after 2 steps"),
    ({"failed": "not done after 420 s", "limit": 420.0}, "> 420 s"),
    ({"failed": "no memory", "limit": 420.0}, "needs"),
]


@pytest.mark.parametrize(
    ("name", "what", "field", "told"), [*FAILED, *(("elevation", {"stock": of}, "off", told) for of, told in STOPPED)]
)
def test_what_failed_has_a_row_too(results, name, what, field, told):
    first = next(rows.rows({name: {**results[name], **what}}))
    assert getattr(first, field).startswith(told)
    assert "child" not in what or not first.headline


def test_a_function_runs_in_a_fresh_process_or_the_reason_is_told():
    assert children.in_child("json", "loads", '{"a": 1}') == {"a": 1}
    assert "JSONDecodeError" in children.in_child("json", "loads", "{")["failed"]
    assert children.in_child("time", "sleep", 9, limit=0.2) == {"failed": "not done after 0.2 s"}


def test_json_round_trips_with_short_lists_on_one_line(tmp_path, results):
    script.figures.write(results, tmp_path)
    text = (tmp_path / "end_to_end.json").read_text(encoding="utf-8")
    read = json.loads(text)
    assert read.keys() == results.keys()
    assert read["co2"]["seconds"]["on"] == pytest.approx(results["co2"]["seconds"]["on"], rel=1e-5)
    assert any(line.count(",") >= 11 for line in text.splitlines())
    for name in ("co2.png", "elevation.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("what", ["versions", "quick"])
def test_figures_of_other_versions_are_not_mixed_in(results, what):
    said: list[str] = []
    assert script.kept({**results, what: None}, results, ["co2"], said.append) == {}
    assert script.kept({**results, what: None}, results, WORKLOADS, said.append) == {}
    assert len(said) == 1
    assert "cg" in said[0]
    assert said[0].endswith(f"other {what} than in this run")


def test_partial_runs_add_up_in_the_file(tmp_path, monkeypatch, results):
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
