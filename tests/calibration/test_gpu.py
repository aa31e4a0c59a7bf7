"""The logic of `calibration/gpu.py` at tiny sizes, with the CPU in the place of the accelerator; never a timing."""

import json

import gpu
import gpu_tables
import products
import programs
import pytest

WITHOUT_DEVICE = [name for name in gpu.SECTIONS if name != "waits"]
TINY = {
    "STEPS": (20,), "FANTASIES": ((20,), (1, 4)), "CROSSED": dict.fromkeys(gpu.CROSSED, (16,)), "BATCHES": (1, 8),
    "DRAWN": 2, "PRODUCTS": (300, (3,)), "PEAK": {"copy": 2**12, "gemm": 32},
    "OPTIONS": {"seconds": 0.02, "rounds": (2, 3)},
}  # fmt: skip


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run sections at sizes for a test; nothing is compiled, and one short program stands for all."""
    script = programs.programs()["gp_tutorial"]
    for name, value in TINY.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(gpu.regret, "random_problems", lambda *_, **__: [gpu.Problem(op="qr", m=30, n=10)])
    monkeypatch.setattr(products, "TILES", {"cpu": ((16, 32), 1)})
    monkeypatch.setattr(products, "without_keops", lambda: "nothing is compiled here")
    monkeypatch.setattr(programs, "programs", lambda: {"gp_tutorial": script})

    def run(*arguments, code=0):
        assert gpu.main([*arguments, "--device", "cpu", "--output", str(tmp_path / "gpu.json")]) == code
        return json.loads((tmp_path / "gpu.json").read_text()).get("sections")

    return run


@pytest.mark.slow
def test_every_section_has_its_rows(run):
    found = run(*WITHOUT_DEVICE)
    assert list(found) == WITHOUT_DEVICE
    for section, rows in found.items():
        assert rows, section
        assert not [row for row in rows.values() if "error" in row], section
    assert {row["against_default"]["pairs"] >= 3 for row in found["steps"].values()} == {True}
    assert all(row["agreement"]["on"]["loss"] < 1e-4 for row in found["steps"].values())
    assert all(row["difference"] < 1e-10 for row in found["fantasies"].values())
    assert found["programs"]["gp_tutorial"]["difference"] < 1e-2
    assert list(found["programs"]["gp_tutorial"]["runs"]) == ["off", "on", "graphs"]
    assert all(row["problem"].get("batch", 1) in (1, 8) for row in found["crossovers"].values())


def test_a_run_goes_on_where_it_stopped(run, tmp_path, capsys):
    path = tmp_path / "gpu.json"
    gpu.save(gpu.describe(gpu.host.current().fields, quick=False), path)
    run("peaks", "--seconds", "0", code=3)
    assert "3 rows are missing" in capsys.readouterr().out
    first = run("peaks")
    assert len(first["peaks"]) == 3
    assert run("peaks") == first
    other = json.loads(path.read_text())
    other["host"] = {"cpu": {"model": "another"}}
    path.write_text(json.dumps(other))
    assert run("peaks") != first
    assert "begins anew" in capsys.readouterr().out


def test_a_row_that_fails_is_told_and_the_next_one_is_measured(run, monkeypatch):
    monkeypatch.setattr(gpu, "copied", lambda *_: 1 / 0)
    found = run("peaks")
    assert found["peaks"]["copy"]["error"] == "ZeroDivisionError: division by zero"
    assert found["peaks"]["gemm, float64"]["flops_per_second"] > 0
    assert gpu_tables.summary({"sections": found}) == ["peaks: 2 rows, 1 failed"]


def test_what_failed_and_what_ran_twice_stands_in_no_table():
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
