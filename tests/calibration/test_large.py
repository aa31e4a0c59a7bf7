"""large.py: ten models and steps beside stock, tables, and what the package ships of them."""

from pathlib import Path

import large
import large_tables
import linear_operator
import pytest


@pytest.fixture(scope="module")
def model():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large, "ROUNDS", 1)
        patch.setattr(large, "SECONDS", 1e-3)
        return large.run_model("scales", 820)


@pytest.fixture(scope="module")
def step():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large, "ROUNDS", 1)
        patch.setattr(large, "STEPPED", "surface")
        return large.run_steps(820)


def test_a_model_is_compared_with_stock_and_with_the_truth(model):
    assert model["products"] >= 22
    assert model["candidate"] != "stock"
    assert model["errors"]["on"]["gradient"] < 1e-8 < model["errors"]["off"]["gradient"]
    assert min(model["ratio"], model["alone"]) > 0
    assert linear_operator.utils.linear_cg.__module__ == "linear_operator.utils.linear_cg"


def test_a_step_is_compared_with_both_tolerances(step):
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
    assert found["exact"] >= 1500
    assert large_tables.exact_up_to(22, {1: 1e9}, 1.0) >= 3000
    assert large_tables.exact_up_to(22, {1: 22}, 1e-3) == 0


def test_figures_that_the_package_does_not_ship_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(large, "SHIPPED", tmp_path / "iterations.json")
    large.SHIPPED.write_text("{}")
    evidence = str(Path(__file__).parents[2] / "docs" / "evidence.md")
    assert large.main(["--check", evidence]) == 1
    assert "run --ship" in capsys.readouterr().out
    assert large.main(["--ship"]) == 0
    assert large.main(["--check", evidence]) == 0
