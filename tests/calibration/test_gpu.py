"""The logic of `calibration/gpu.py` at tiny sizes, with the CPU in the place of the accelerator; never a timing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu
import gpu_tables
import products
import programs
import pytest

WITHOUT_DEVICE = [name for name in gpu.SECTIONS if name != "waits"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for a test; nothing is compiled, and one short program stands for all."""
    script = programs.programs()["gp_tutorial"]
    monkeypatch.setattr(gpu, "STEPS", (20,))
    monkeypatch.setattr(gpu, "FANTASIES", ((20,), (1, 4)))
    monkeypatch.setattr(gpu, "CROSSED", dict.fromkeys(gpu.CROSSED, (16,)))
    monkeypatch.setattr(gpu, "BATCHES", (1, 8))
    monkeypatch.setattr(gpu, "DRAWN", 2)
    monkeypatch.setattr(gpu, "PRODUCTS", (300, (3,)))
    monkeypatch.setattr(gpu, "PEAK", {"copy": 2**12, "gemm": 32})
    monkeypatch.setattr(gpu, "PAIRS", 1)
    monkeypatch.setattr(gpu, "OPTIONS", {"seconds": 0.02, "rounds": (2, 3)})
    monkeypatch.setattr(gpu.regret, "random_problems", lambda *_, **__: [gpu.Problem(op="qr", m=30, n=10)])
    monkeypatch.setattr(products, "TILES", {"cpu": ((16, 32), 1)})
    monkeypatch.setattr(products, "without_keops", lambda: "nothing is compiled here")
    monkeypatch.setattr(programs, "programs", lambda: {"gp_tutorial": script})


def run(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = gpu.main([*arguments, "--device", "cpu", "--output", str(path)])
    return code, json.loads(path.read_text())["sections"]


@pytest.mark.slow
def test_every_section_has_its_rows(tiny: None, tmp_path: Path) -> None:
    code, found = run(tmp_path / "gpu.json", *WITHOUT_DEVICE)
    assert code == 0
    assert list(found) == WITHOUT_DEVICE
    for section, rows in found.items():
        assert rows, section
        assert not [row for row in rows.values() if "error" in row], section
    assert {row["against_default"]["pairs"] >= 3 for row in found["steps"].values()} == {True}
    assert all(row["agreement"]["on"]["loss"] < 1e-4 for row in found["steps"].values())
    assert all(row["difference"] < 1e-10 for row in found["fantasies"].values())
    assert found["programs"]["gp_tutorial, pair 1"]["difference"] < 1e-2
    assert all(row["problem"].get("batch", 1) in (1, 8) for row in found["crossovers"].values())


def test_a_run_goes_on_where_it_stopped(tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    gpu.save(gpu.describe(gpu.host.current().fields, quick=False), path)
    assert gpu.main(["peaks", "--device", "cpu", "--output", str(path), "--seconds", "0"]) == 3
    assert "3 rows are missing" in capsys.readouterr().out
    code, first = run(path, "peaks")
    assert code == 0
    assert len(first["peaks"]) == 3
    code, again = run(path, "peaks")
    assert (code, again) == (0, first)
    other = json.loads(path.read_text())
    other["host"] = {"cpu": {"model": "another"}}
    path.write_text(json.dumps(other))
    _, anew = run(path, "peaks")
    assert anew != first
    assert "begins anew" in capsys.readouterr().out


def test_a_row_that_fails_is_told_and_the_next_one_is_measured(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu, "copied", out_of_memory)
    code, found = run(tmp_path / "gpu.json", "peaks")
    assert code == 0
    assert found["peaks"]["copy"]["error"] == "RuntimeError: out of memory"
    assert found["peaks"]["gemm, float64"]["flops_per_second"] > 0
    assert gpu_tables.summary({"sections": found}) == ["peaks: 2 rows, 1 failed"]


def test_what_failed_and_what_ran_twice_stands_in_no_table() -> None:
    failed, ratio = {"error": "RuntimeError: out of memory"}, {"off": 2.0, "on": 1.0, "ratio": 2.0}
    step = {"against_default": ratio, "against_exact": ratio}
    ran = {"ratio": 3.0, "runs": {"off": {"seconds": 3.0}, "on": {"seconds": 1.0}}}
    results = json.loads(gpu.JSON_PATH.read_text())
    results["sections"] = {
        "steps": {"n=20, float32": step, "n=50000, float64": failed},
        "programs": {"one, pair 1": ran, "two, pair 1": failed, "one, pair 2": ran},
    }
    told = gpu_tables.short(results)
    assert "of 20 to 20 points are 2.00× as fast (geometric mean, least 2.00×), and 1 programs" in told
    text = gpu_tables.block(results)
    assert "50,000" not in text
    assert "two" not in text
    assert [line.split(" | ")[0] for line in text.splitlines() if "`one" in line] == ["| `one`", "| `one, pair 2`"]
    results["sections"]["programs"] = {}
    with pytest.raises(ValueError, match="no programs"):
        gpu_tables.block(results)
