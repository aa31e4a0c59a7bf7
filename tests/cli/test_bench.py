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
from autokern.cli.bench.regret import AGAIN, apart
from autokern.cli.commands import app
from autokern.cli.report.benchmark import of_benchmark
from autokern.core.errors import SettingsError
from autokern.core.problem import Problem
from autokern.core.registry import get, registered
from autokern.system import host
from autokern.tuning import timer
from autokern.tuning.drawing import LIMITS


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
    (row,) = bench.timed([problem], math.inf, rounds=(3, 5))
    assert row.fastest == row.best(0) == row.best(1) == "other"
    assert (row.regret("other"), row.over_stock("other")) == (1.0, pytest.approx(0.5))
    assert (row.regret("stock"), row.over_stock("stock")) == (pytest.approx(2.0), 1.0)
    assert set(row.ratios) == {"stock", "other", AGAIN}
    assert row.seconds == pytest.approx(1e-3)


def test_the_luckiest_timing_is_no_regret():
    """Of two equal candidates one always looks faster in one half; the other half says how fast it is."""
    ratios = {"stock": (1.0, 1.0), "other": (0.8, 1.25), AGAIN: (1.0, 1.0)}
    row = bench.Row(problem=Problem(op="qr"), seconds=1e-3, ratios=ratios)
    assert row.regret("stock") == pytest.approx(math.sqrt(1 / 1.25 * 1.0))
    assert row.over_stock("other") == pytest.approx(1.0)


def test_timing_stops_at_its_deadline(make_op, clock):
    problem = _two_candidates(make_op, 1.0, clock)
    assert bench.timed([problem], time.perf_counter() - 1) == []


def test_a_candidate_that_fails_takes_no_part(make_op, clock):
    problem = _two_candidates(make_op, 1.0, clock)

    def broken(a):
        raise RuntimeError("no")

    get("bench_probe").candidate("broken")(broken)
    (row,) = bench.timed([problem], math.inf, rounds=(2, 2))
    assert "broken" not in row.ratios
    assert row.regret("broken") == row.regret("stock"), "stock runs in its place"


def _row(n: int, seconds: float = 1e-3, **ratios: float) -> bench.Row:
    both = {"stock": (1.0, 1.0), AGAIN: (1.02, 1.02), **{name: (ratio, ratio) for name, ratio in ratios.items()}}
    return bench.Row(problem=Problem(op="qr", m=n, n=n), seconds=seconds, ratios=both)


def test_verdict():
    rows = [*[_row(n, a=0.5) for n in range(1, 20)], _row(20, a=1.1, b=0.55), _row(21, seconds=1e-6, a=9.0)]
    found = bench.verdict(rows, lambda problem: "a")
    assert found.problems == 20, "what takes less than 30 us does not count"
    assert found.regret_geomean == pytest.approx(2 ** (1 / 20))
    assert found.regret_p95 == 1.0
    assert found.slower_share == pytest.approx(1 / 20)
    assert found.speedup == pytest.approx((2**19 / 1.1) ** (1 / 20))
    assert bench.noise_floor(rows).regret_geomean == pytest.approx(1.02)
    with pytest.raises(SettingsError):
        bench.verdict([], lambda problem: "a")


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
    monkeypatch.setattr("autokern.cli.commands_bench.bench.everything", lambda full, tell: found)
    monkeypatch.setattr("autokern.cli.commands_bench.measuring.calibrate", lambda **options: None)
    told = CliRunner().invoke(app, ["bench", "--quick", "--json"])
    assert told.exit_code == 1
    assert "2 results of kernel_matrix differ" in told.stderr
    assert len(json.loads(told.stdout)["kernel_matrices"]) == 4


def test_kernel_table_says_what_it_had_no_time_for():
    cells = bench.kernel_matrices([40], time.perf_counter() - 1, families=["rbf"], dtypes=["float32"])
    assert {c.failed for c in cells} == {"no time was left"}


@pytest.mark.gpu
@pytest.mark.skipif(host.accelerator() is None or host.accelerator().type != "cuda", reason="needs a CUDA device")
@pytest.mark.skipif("support.gpu_on_cpu" in sys.modules, reason="times of a played GPU mean nothing")
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
    row = bench.Row(problem=plain, seconds=1e-3, ratios={"stock": (1.0, 1.0), "gemm": (0.5, 0.5), AGAIN: (1.0, 1.0)})
    models = [
        bench.Workload(
            name="step", dtype="float64", off=2e-3, on=1e-3, speedup=2.0, low=1.8, high=2.2, pairs=5, difference=0.0
        )
    ]
    regret = {"all": bench.verdict([row], lambda problem: "stock")}
    judged = {"regret": regret, "floor": bench.noise_floor([row]), "problems": [row], "chosen": ["stock"]}
    bench_tables.show(bench.Benchmark(host={}, kernel_matrices=cells, workloads=models, **judged))
    out = capsys.readouterr().out
    for words in (
        "1.00 ms",
        "4.00¹",
        "¹ gemm: never chosen here, a reason",
        "² cpu: not timed, no device",
        "chose stock, best is gemm",
        "noise",
    ):
        assert words in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("low", "middle", "high", "told"),
    [(0.7, 0.8, 0.9, True), (0.7, 0.8, 1.1, False), (0.96, 0.97, 0.98, False), (1.8, 2.0, 2.2, False)],
)
def test_models_that_are_slower_with_autokern_are_named(capsys, low, middle, high, told):
    model = bench.Workload(
        name="step",
        dtype="float64",
        off=1.0,
        on=1 / middle,
        speedup=middle,
        low=low,
        high=high,
        pairs=5,
        difference=0.0,
    )
    found = bench.Benchmark(host=host.current().fields, workloads=[model])
    bench_tables.show(found)
    out, page = " ".join(capsys.readouterr().out.split()), str(of_benchmark(found))
    for text in (out, page):
        assert ("step in float64 is slower with autokern here: it takes 1.25 times as long as stock" in text) == told
        assert ("AUTOKERN=0" in text) == told


def test_an_exact_choice_is_compared_with_what_is_exact_where_stock_is_loose():
    ratios = {"stock": (1.0, 1.0), "matrix-free": (0.5, 0.5), "fused": (0.9, 0.9), "recursive": (0.8, 0.8)}
    loose = Problem(op="exact_log_prob", m=3000, n=3000, d=2, variant="rbf/cg", grad="theta")
    for problem, name, expected in (
        (loose, "fused", 0.9 / 0.8),
        (loose, "recursive", 1.0),
        (loose, "stock", 2.0),
        (loose.replace(variant="rbf/cholesky"), "fused", 1.8),
    ):
        row = bench.Row(problem=problem, seconds=1.0, ratios={**ratios, AGAIN: (1.0, 1.0)})
        found = bench.verdict([row], lambda problem, name=name: name)
        assert found.regret_geomean == pytest.approx(expected)
        assert found.speedup == pytest.approx(1 / ratios[name][0])
    small = loose.replace(m=2000, n=2000)  # the largest ones are solved to a residual, which costs less than stock
    rows = [bench.Row(problem=p, seconds=1.0, ratios=ratios) for p in (small, small.replace(variant="rbf/cholesky"))]
    assert apart(rows) == (rows[1:], rows[:1])
