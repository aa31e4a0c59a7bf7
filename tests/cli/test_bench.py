"""Bench: problems off the grid, regret that noise does not make, and results that are really computed."""

from __future__ import annotations

import json
import math
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from autokern.cli import bench, bench_tables
from autokern.cli.bench.problems import LIMITS
from autokern.cli.commands import app
from autokern.core.errors import SettingsError
from autokern.core.problem import Problem
from autokern.core.registry import get, registered
from autokern.system import host
from autokern.tuning import timer
from autokern.tuning.profile import Timing


@pytest.mark.slow
def test_random_problems_are_off_the_grid_within_limits_and_reproducible():
    problems = bench.random_problems(120, seed=3)
    assert problems == bench.random_problems(120, seed=3)
    assert problems != bench.random_problems(120, seed=4)
    assert len(set(problems)) == 120
    offers = [
        op.name for op in registered() if any(len(bench.contenders(p)) > 1 for p in op.grid("full", "float64", "cpu"))
    ]
    assert {p.op for p in problems} == set(offers)
    assert {p.dtype for p in problems} == {"float32", "float64"}
    assert any(p.grad for p in problems)
    assert any(p.batch > 1 for p in problems)
    for p in problems:
        assert p.n <= LIMITS.get(p.op, {}).get("n", math.inf)
        assert p.batch <= 256
        assert p.d <= (256 if p.op == "kernel_matmul" else 32)
        assert len(bench.contenders(p)) > 1


def test_random_problems_are_what_their_samples_are():
    """A problem that its own op would describe otherwise tests nothing."""
    for problem in bench.random_problems(40, seed=5, flops=1e8, bytes=1e7):
        op = get(problem.op)
        args = op.sample(problem, torch.Generator().manual_seed(0))
        assert op.problem_of(*args) == problem


@pytest.mark.slow
def test_random_problems_obey_the_cap_on_work():
    for problem in bench.random_problems(40, seed=1, flops=1e6, bytes=1e6):
        work = get(problem.op).stock.features(problem)
        assert work.flops <= 1e6
        assert work.bytes <= 1e6


def test_random_problems_of_one_op_and_of_none():
    assert {p.op for p in bench.random_problems(5, ops=["qr"])} == {"qr"}
    with pytest.raises(SettingsError, match="unknown op"):
        bench.random_problems(5, ops=["qrr"])


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when it is told to: `clock.now`."""
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: made.now))
    monkeypatch.setattr(timer, "_switches", lambda: 0)
    return made


def _two_candidates(make_op, ratio: float, clock: SimpleNamespace):
    """An op whose second candidate takes `ratio` times as long as stock."""
    op = make_op("bench_probe", grid=lambda level, dtype, device: [Problem(op="bench_probe", m=4, n=4)])

    def stock(a):
        clock.now += 1e-3
        return 2 * a

    def other(a):
        clock.now += 1e-3 * ratio
        return 2 * a

    op.candidate("stock")(stock)
    op.candidate("other")(other)
    return Problem(op="bench_probe", m=4, n=4)


def test_regret_of_a_good_and_of_a_bad_choice(make_op, clock):
    problem = _two_candidates(make_op, 0.5, clock)
    good, bad = (
        bench.regret([problem], math.inf, lambda p, name=name: name, rounds=(3, 5))[0] for name in ("other", "stock")
    )
    assert (good.best, good.regret) == ("other", 1.0)
    assert good.over_stock == pytest.approx(0.5)
    assert (bad.best, bad.over_stock) == ("other", 1.0)
    assert bad.regret == pytest.approx(2.0)
    assert set(bad.seconds) == set(bad.ratios) == {"stock", "other"}


def test_the_luckiest_timing_is_no_regret(make_op, monkeypatch, clock):
    """Of two equal candidates one always looks faster at first; only fresh timings of both count."""
    problem = _two_candidates(make_op, 1.0, clock)
    told = iter([{"stock": 1.0, "other": 0.8}, {"stock": 1.0, "other": 1.0}])
    monkeypatch.setattr(
        timer, "compare", lambda calls, **more: {n: Timing(1e-3, r) for n, r in next(told).items() if n in calls}
    )
    row = bench.regret([problem], math.inf, lambda p: "stock")[0]
    assert (row.regret, row.best) == (1.0, "stock")


def test_regret_stops_at_its_deadline(make_op, clock):
    problem = _two_candidates(make_op, 1.0, clock)
    assert bench.regret([problem], time.perf_counter() - 1, lambda p: "stock") == []


def test_a_candidate_that_fails_takes_no_part(make_op, clock):
    problem = _two_candidates(make_op, 1.0, clock)

    def broken(a):
        raise RuntimeError("no")

    get("bench_probe").candidate("broken")(broken)
    row = bench.regret([problem], math.inf, lambda p: "stock", rounds=(2, 2))[0]
    assert "broken" not in row.seconds
    assert bench.regret([problem], math.inf, lambda p: "broken") == []


def test_verdict():
    def row(regret: float, over_stock: float) -> bench.Row:
        empty: dict[str, float] = {}
        return bench.Row(
            problem=Problem(op="qr"), chosen="a", best="b", regret=regret, over_stock=over_stock, seconds=empty,
            ratios=empty, noise=empty,
        )  # fmt: skip

    found = bench.verdict([*[row(1.0, 0.5)] * 19, row(2.0, 1.1)])
    assert found.problems == 20
    assert found.regret_geomean == pytest.approx(2 ** (1 / 20))
    assert found.regret_p95 == 1.0
    assert found.slower_share == pytest.approx(1 / 20)
    assert found.speedup == pytest.approx((2**19 / 1.1) ** (1 / 20))
    with pytest.raises(SettingsError):
        bench.verdict([])


def _table(**options) -> list[bench.Cell]:
    usual = {"families": ["rbf"], "dtypes": ["float64"], "seconds": 0.05}
    return bench.kernel_matrices([40], math.inf, **{**usual, **options})


def test_kernel_table_has_every_candidate_with_a_time_or_a_reason(monkeypatch):
    module = sys.modules["autokern.cli.bench.kernel_matrices"]  # the package's name is the function
    monkeypatch.setattr(module, "_impossible", lambda c, p: "left out" if c.compiles else "")
    cells = _table()
    op = get("kernel_matrix")
    assert [(c.candidate, c.problem.grad) for c in cells] == [(n, g) for g in ("", "theta") for n in op.names()]
    for cell in cells:
        assert cell.agrees
        assert cell.failed or (cell.seconds > 0 and cell.ratio > 0)
    refused = {c.candidate for c in cells if c.refused and not c.failed}
    assert {"vmap", "cdist", "torchscript"} <= refused


def test_kernel_table_unmasks_what_computes_something_else(monkeypatch):
    op = get("kernel_matrix")
    honest = op["gemm"]
    wrong = type(honest)("gemm", lambda k, x1, x2: 1.001 * honest.run(k, x1, x2))
    monkeypatch.setattr(op, "listed", [op.stock, wrong])
    cells = _table()
    assert [c.agrees for c in cells] == [True, False, True, False]
    found = bench.Benchmark(host={}, kernel_matrices=cells)
    monkeypatch.setattr("autokern.cli.commands.bench.everything", lambda full, tell: found)
    monkeypatch.setattr("autokern.cli.commands.measure", lambda **options: None)
    told = CliRunner().invoke(app, ["bench", "--quick", "--json"])
    assert told.exit_code == 1
    assert "2 results of kernel_matrix differ" in told.stderr
    assert len(json.loads(told.stdout)["kernel_matrices"]) == 4


def test_kernel_table_says_what_it_had_no_time_for():
    cells = bench.kernel_matrices([40], time.perf_counter() - 1, families=["rbf"], dtypes=["float32"])
    assert {c.failed for c in cells} == {"no time was left"}


@pytest.mark.gpu
@pytest.mark.skipif(host.accelerator() is None or host.accelerator().type != "cuda", reason="needs a CUDA device")
def test_events_and_profiler_tell_what_the_wall_clock_tells():
    cells = [c for c in bench.kernel_matrices([2000], math.inf, families=["rbf"], devices=["cuda"]) if not c.failed]
    assert cells
    for cell in cells:
        assert cell.agrees
        assert 0 < cell.profiler_seconds < 1.5 * cell.seconds
        assert 0 < cell.event_seconds < 3 * cell.seconds


def test_whole_models_give_the_same_results_off_and_on():
    found = bench.end_to_end(time.perf_counter(), rounds=1, dtypes=["float64"])
    assert [w.name for w in found] == ["training step, n=500", "one-point update, n=400"]
    for workload in found:
        assert workload.off > 0
        assert workload.on > 0
        assert workload.difference < 1e-5


def test_benchmark_is_printed_in_tables(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    kind = {"n": 1000, "m": 1000, "d": 8, "variant": "rbf/same/ard"}
    plain, graded = (Problem(op="kernel_matrix", grad=g, **kind) for g in ("", "theta"))
    cells = [
        bench.Cell(problem=plain, candidate="stock", seconds=1e-3, ratio=1.0),
        bench.Cell(problem=graded, candidate="stock", seconds=2e-3, ratio=1.0),
        bench.Cell(problem=plain, candidate="gemm", seconds=5e-4, ratio=2.0),
        bench.Cell(problem=graded, candidate="gemm", seconds=5e-4, ratio=4.0, refused="a reason"),
        bench.Cell(problem=graded, candidate="cpu", failed="no device"),
    ]
    rows = bench.Row(
        problem=plain, chosen="stock", best="gemm", regret=2.0, over_stock=1.0, seconds={}, ratios={}, noise={}
    )
    models = [bench.Workload(name="step", dtype="float64", off=2e-3, on=1e-3, speedup=2.0, pairs=5, difference=0.0)]
    regret = {"all": bench.verdict([rows])}
    bench_tables.show(bench.Benchmark(host={}, kernel_matrices=cells, regret=regret, problems=[rows], workloads=models))
    out = capsys.readouterr().out
    for words in (
        "1.00 ms",
        "4.00¹",
        "¹ gemm: never chosen here, a reason",
        "² cpu: not timed, no device",
        "chose stock",
    ):
        assert words in out
    assert max(map(len, out.splitlines())) <= 100
