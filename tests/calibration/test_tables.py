"""What gains.py, ranks.py and closures.py compute; large.py: ten models and steps beside stock, and what is shipped."""

from pathlib import Path

import closures
import gains
import large
import large_tables
import linear_operator
import numpy as np
import pytest
import ranks


def test_rows_of_dispatched_calls_are_judged_by_the_other_half() -> None:
    half = {
        name: type("Timing", (), {"ratio": ratio, "seconds": 1.0})
        for name, ratio in {
            "stock": 1.0,
            "fast": 0.5,
            **{f"dispatched {side}": 0.6 for side in gains.SIDES[1:]},
        }.items()
    }
    assert gains._row("p", [half, half])["full"] == pytest.approx(1.2)


def test_the_model_of_costs():
    assert ranks.predicted(1000, 1, 1e6, 1e-3, 1e9) == 1.0
    assert ranks.predicted(1000, 4, 1e6, 1e-3, 1e9) == pytest.approx(0.25 + 1.5 * 8 * 1000 * 11 / 1e9 + 12e-3)


@pytest.fixture
def case():
    return closures.Case(15)


@pytest.mark.parametrize("name", ["lapack", "jax"])
def test_the_arithmetic_alone_is_that_of_botorch(case, name):
    if name == "jax":
        pytest.importorskip("jax")
    way = {"lapack": closures.by_lapack, "jax": closures.by_jax}[name](case)
    for point in (case.start(), 1.3 * case.start()):
        value, slopes = way(point)
        expected, expected_slopes = case.closure()(point)
        assert value == pytest.approx(float(expected), rel=1e-7)  # the priors of BoTorch are in single precision
        np.testing.assert_allclose(slopes, expected_slopes, rtol=1e-6, atol=1e-8)


@pytest.fixture(scope="module")
def quick():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"ROUNDS": 1, "SECONDS": 1e-3, "STEPPED": "surface"}.items():
            patch.setattr(large, name, value)
        yield


@pytest.fixture(scope="module")
def model(quick):
    return large.run_model("scales", 820)


def test_a_model_is_compared_with_stock_and_with_the_truth(model):
    assert model["products"] >= 22
    assert model["candidate"] != "stock"
    assert model["errors"]["on"]["gradient"] < 1e-8 < model["errors"]["off"]["gradient"]
    assert min(model["ratio"], model["alone"]) > 0
    assert linear_operator.utils.linear_cg.__module__ == "linear_operator.utils.linear_cg"


def test_a_step_is_compared_with_both_tolerances(quick):
    step = large.run_steps(820)
    assert step["formed"]
    assert step["errors"]["on"]["gradient"] < 1e-8
    assert step["errors"]["tight"]["gradient"] < step["errors"]["off"]["gradient"]
    assert min(step[f"against_{side}"]["ratio"] for side in ("off", "tight")) > 0


def results(models, steps):
    host = {"cpu": {"model": "a machine", "torch_threads": 2}}
    return {"models": models, "steps": steps, "host": host, "versions": {"torch": "2"}, "date": "2026-01-01"}


def test_what_is_shipped_is_what_was_counted(model):
    cases = [
        {**model, "n": n, "products": products, "errors": {"off": {"gradient": error, "loss": 0.1}}, "alone": alone}
        for n, products, error, alone in ((1500, 22, 0.1, 1.5), (1500, 88, 1.0, 1.5), (2000, 22, 3.0, 1.5))
    ]
    found = large_tables.shipped(results(cases, []))
    assert (found["least"], found["points"], found["usual"], found["alone"]) == (22, [1500, 2000], [44.0, 22.0], 1.5)
    assert found["errors"][0] < found["errors"][1]
    steps = [{"candidate": "fused", "n": n, "ratio": ratio} for n, ratio in ((1500, 2.0), (2000, 0.8), (4000, 0.7))]
    assert large_tables.exact_up_to(steps) == 2000
    assert large_tables.exact_up_to([{**step, "candidate": "state-space"} for step in steps]) == 0


def test_figures_that_the_package_does_not_ship_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(large, "SHIPPED", tmp_path / "iterations.json")
    large.SHIPPED.write_text("{}")
    evidence = str(Path(__file__).parents[2] / "docs" / "evidence.md")
    assert large.main(["--check", evidence]) == 1
    assert "run --ship" in capsys.readouterr().out
    assert large.main(["--ship"]) == 0
    assert large.main(["--check", evidence]) == 0
