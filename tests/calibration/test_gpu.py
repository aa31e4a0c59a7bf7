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
    "DRAWN": 2, "INVERTED": (9,), "WARM": 2, "PRODUCTS": (300, (3,)), "PEAK": {"copy": 2**12, "gemm": 32},
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
        (machine,) = json.loads((tmp_path / "gpu.json").read_text()).values()
        return machine.get("sections")

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
    here = gpu.describe(gpu.host.current().fields, quick=False)
    name = gpu_tables.named(here)
    gpu.save({name: here}, path)
    run("peaks", "--seconds", "0", code=3)
    assert "3 rows are missing" in capsys.readouterr().out
    first = run("peaks")
    assert len(first["peaks"]) == 3
    assert run("peaks") == first
    other = json.loads(path.read_text())
    other[name]["host"] = {"cpu": {"model": "another"}}
    path.write_text(json.dumps(other))
    assert run("peaks") != first
    assert "begins anew" in capsys.readouterr().out


@pytest.mark.parametrize("written", ["", "no JSON", "[]", '{"schema": 1, "host": {}, "sections": {}}', '{"one": {}}'])
@pytest.mark.parametrize("task", ["", "--check"])
def test_what_is_no_result_by_machine_is_refused_and_left_alone(tmp_path, capsys, written, task):
    path, document = tmp_path / "gpu.json", tmp_path / "README"
    path.write_text(written)
    document.write_text("<!-- gpu: begin -->\n<!-- gpu: end -->\n")
    with pytest.raises(SystemExit) as ended:
        gpu.main(["peaks", "--device", "cpu", "--output", str(path), *([task, str(document)] if task else [])])
    assert ended.value.code == 2
    assert "Expecting value" in (told := capsys.readouterr().err) or "by the name of a machine" in told
    assert path.read_text() == written


def test_a_row_that_fails_is_told_and_the_next_one_is_measured(run, monkeypatch):
    monkeypatch.setattr(gpu, "copied", lambda *_: 1 / 0)
    found = run("peaks")
    assert found["peaks"]["copy"]["error"] == "ZeroDivisionError: division by zero"
    assert found["peaks"]["gemm, float64"]["flops_per_second"] > 0
    assert gpu_tables.summary({"sections": found}) == ["peaks: 2 rows, 1 failed"]


def test_what_failed_stands_in_no_table_and_each_machine_has_its_own():
    failed, ratio = {"error": "RuntimeError: out of memory"}, {"off": 2.0, "on": 1.0, "ratio": 2.0}
    slow, half = {**ratio, "ratio": 0.5}, {"off": {"seconds": 3.0}, "on": {"seconds": 1.0}}
    step = {"against_default": ratio, "against_exact": ratio, "agreement": {"on": {"gradient": 0.0}}}
    peaks = {f"gemm, {dtype}": {"flops_per_second": 1e12} for dtype in ("float32", "float64")}
    one, other = json.loads(gpu.JSON_PATH.read_text()).values()
    one |= {"date": "2026-01-01", "sections": {"peaks": peaks, "programs": {"one": {"ratio": 3.0, "runs": half}}}}
    other |= {"date": "2026-01-02"}
    other["sections"] = {
        "peaks": peaks,
        "steps": {
            "n=20, float32": step,
            "n=20, float32, without recordings": {"against_default": slow, "against_exact": slow},
            "n=3000, float64": step,
            "n=50000, float64": failed,
        },
        "fantasies": {"n=50, batch=1": ratio, "n=50, batch=8": failed, "n=70, batch=8": ratio},
        "programs": {},
    }
    results = {"the first": one, "the second": other}
    other["sections"].pop("programs")
    told = gpu_tables.short(results)
    assert "of 20 to 3,000 points are 2.00× as fast (geometric mean, least 2.00×), and updates by one" in told
    assert "On an the first, 1 programs of BoTorch after the imports are 3.00× as fast (geometric mean" in told
    text = gpu_tables.block(results)
    assert text.index("### the second") < text.index("### the first")
    assert "50,000" not in text
    assert "| 20 | float32 | 2.00 s | 2.00 s | 1.00 s | 2.00 | 2.00 | 0.50 |  |" in text
    assert "| 3,000 | float64 | 2.00 s | 2.00 s | 1.00 s | 2.00 | 2.00 |  | 37 |" in text
    assert [line for line in text.splitlines() if line[:4] in ("| 50", "| 70")] == [
        "| 50 | 2.00 s, 2.00× |  |",
        "| 70 |  | 2.00 s, 2.00× |",
    ]
    del one["sections"]["programs"]
    with pytest.raises(ValueError, match="no programs were measured"):
        gpu_tables.short(results)
