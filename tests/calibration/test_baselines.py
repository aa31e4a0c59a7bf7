"""baselines.py: exact models beside approximations, on few points; figures, tables and plots, never a timing."""

import copy
import json

import approximations
import baseline_tables
import baselines
import pytest
import regressions
import torch
from workloads import Regression, scaled

pytestmark = pytest.mark.usefixtures("one_thread")


def few(data, n):
    return data._replace(x=data.x[:n], y=data.y[:n], held_x=data.held_x[:100], held_y=data.held_y[:100])


@pytest.fixture(scope="module")
def results():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "in_child", lambda module, name, *given, **_: getattr(baselines, name)(*given))
        patch.setattr(baselines, "PART", 100)
        patch.setattr(baselines, "PART_STEPS", 3)
        patch.setattr(approximations, "MOST", 3)
        known = copy.deepcopy(baselines.WORKLOADS)
        known["heights"] |= {"n": 900, "exact": [0, 1], "methods": [("SVGP", 16), ("SGPR", 16), ("Falkon", 64)]}
        known["all-heights"] |= {"n": 900, "methods": [("Falkon", 64)]}
        known["roads"] |= {"n": 1000, "exact_n": 900, "exact": [0, 1], "methods": [("SVGP", 512)]}
        known["co2"] |= {"exact": [2]}
        data = {
            "heights": regressions.heights,
            "roads": lambda: regressions.roads(1000),
            "co2": lambda: few(regressions.co2(), 500),
        }
        found = {}
        for name, of in known.items():
            of["seconds"] = 0.05
            patch.setitem(baselines.WORKLOADS, name, of)
            patch.setitem(baselines.DATA, of["data"], data[of["data"]])
        for name in known:
            found[name] = baselines.measured(name, {"workloads": found}, lambda said: None)
    return {**baselines.describe({}, quick=False), "workloads": json.loads(json.dumps(found))}


@pytest.mark.slow
def test_each_method_has_errors_and_seconds(results):
    for name, workload in results["workloads"].items():
        for method, found in workload["methods"].items():
            assert found["points"], (name, method)
            assert all(point["seconds"] >= point["forecast"] > 0 for point in found["points"])
    heights = results["workloads"]["heights"]["methods"]
    assert list(heights) == ["part", "SVGP, 16", "SGPR, 16", "Falkon, 64", "autokern"]
    assert ["nll" in one["points"][-1] for one in heights.values()] == [True, True, True, False, True]
    assert heights["autokern"]["residual"] < 1e-1
    assert heights["autokern"]["points"][-1]["rmse"] < heights["part"]["points"][-1]["rmse"]
    begun = results["workloads"]["all-heights"]["methods"]["autokern"]
    assert begun["state"] == heights["autokern"]["state"]  # it goes on from there
    series = results["workloads"]["co2"]["methods"]
    assert series["autokern"]["loss"] == pytest.approx(series["exact stock"]["loss"], abs=1e-8)


@pytest.mark.slow
def test_tables_and_plots_hold_what_was_found(results, tmp_path):
    failed = copy.deepcopy(results)
    failed["workloads"]["heights"]["methods"]["autokern"] = {"failed": "not done after 1 s"}
    assert "| exact, autokern | | | | not done after 1 s |" in baseline_tables.block(failed)
    baseline_tables.plot(failed, tmp_path)
    for name in ("baselines_rmse.png", "baselines_nll.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_falkon_converges_to_the_posterior_of_its_centres(monkeypatch):
    monkeypatch.setattr(approximations, "RESIDUAL", 1e-10)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(300, 2, generator=generator, dtype=torch.float64)
    y = (5 * x[:, 0]).sin() + 0.1 * torch.randn(300, generator=generator, dtype=torch.float64)
    model = Regression(x, y, scaled("matern52", 2).double())
    model.likelihood.noise = 0.05
    new = torch.rand(20, 2, generator=generator, dtype=torch.float64)
    *_, forecast = approximations.falkon(model, x, y, 60)
    with torch.no_grad():
        of = [model.covar_module(a, x[:60]).to_dense() for a in (x, x[:60], new)]
        of[1].diagonal().mul_(1 + approximations.JITTER)
        weights = torch.linalg.solve(of[0].mT @ of[0] + 0.05 * of[1], of[0].mT @ y)
        assert (forecast(new)[0] - of[2] @ weights).abs().max() < 1e-6
