"""The logic of `calibration/study.py` on tiny sizes: structure, values, tables and documents; never a timing."""

import choices
import documents
import products
import pytest
import study

import autokern
from autokern.core.problem import Problem
from autokern.core.registry import get


@pytest.fixture
def tiny(monkeypatch):
    """Sizes for a test, children in this process, nothing compiled, nothing calibrated."""
    problems = [Problem(op="kernel_matmul", m=n, n=n, d=2, rhs=11, variant="rbf/same") for n in (40, 80)]
    monkeypatch.setattr(products, "SIZES", {"cpu": (60, (2,))})
    monkeypatch.setattr(products, "GROWN", {"cpu": (20, 40, 60)})
    monkeypatch.setattr(products, "HELD", (100,))
    monkeypatch.setattr(products, "TILES", {"cpu": ((16, 32), 1)})
    monkeypatch.setattr(products, "without_keops", lambda: "nothing is compiled here")
    monkeypatch.setattr(products, "in_child", lambda module, function, *args, **_: getattr(products, function)(*args))
    monkeypatch.setattr(study, "PROBLEMS", 6)
    monkeypatch.setattr(choices, "LEVELS", {"quick": 0.5, "full": 0.5})
    monkeypatch.setattr(choices, "registered", lambda: [get("cholesky")])
    monkeypatch.setattr(choices, "problems", lambda count, device: [Problem(op="cholesky", m=90, n=90, batch=9)])
    monkeypatch.setattr(choices.regret, "LEAST", 0.0)
    monkeypatch.setattr(study, "product_problems", lambda device: problems)
    monkeypatch.setattr(study, "precision_problems", lambda device: problems)
    monkeypatch.setattr(autokern, "calibrate", lambda **_: None)


def run(path, *names):
    assert study.main([*names, "--seconds", "1", "--output", str(path)]) == 0
    return study.read(path)


@pytest.mark.slow
def test_every_study_of_products_has_rows(tiny, tmp_path):
    found = run(tmp_path / "study.json", "products", "scaling", "peaks")
    assert list(found) == ["products", "scaling", "peaks"]
    assert all({"date", "device", "host"} == set(figures["run"]) for figures in found.values())
    assert found["products"]["keops"] == "nothing is compiled here"
    for row in found["products"]["rows"]:
        assert {"the matrix", "stock", "tiled", row["chosen"]} <= set(row["seconds"])
        assert ("tiled-symmetric" in row["seconds"]) == row["same"]
        assert 0 < row["floor"]["half"] <= row["floor"]["seconds"]
    assert [row["n"] for row in found["scaling"]["rows"]] == [20, 40, 60]
    assert all(row["bytes"] >= 0 and row["candidates"] for row in found["peaks"]["rows"])


@pytest.mark.slow
def test_a_run_of_some_studies_keeps_the_others(tiny, tmp_path):
    path = tmp_path / "study.json"
    before = run(path, "product_regret", "precision")
    # against the best of the other half: it may lie below 1
    assert all(row["regret"] > 0 for row in before["product_regret"]["rows"])
    assert {row["candidate"] for row in before["precision"]["rows"]} >= {"float32"}
    assert "float32" in study.precision_table(before["precision"])
    after = run(path, "choices")
    assert list(after) == ["choices", "product_regret", "precision"]
    assert {name: after[name] for name in before} == before
    ways = [row["by"] for row in after["choices"]["summary"]]
    assert {"stock", "no measurement", "calibrate --quick", "calibrate --full", "the same, cholesky"} <= set(ways)
    assert "calibrate --full" in choices.document(after["choices"])
    assert all({"problem", "best", "lost"} <= row.keys() for row in after["choices"]["rows"])


def test_a_document_has_one_place_for_a_block(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("a\n<!-- it: here -->\nold\n<!-- /it -->\nb\n", encoding="utf-8")
    assert not documents.refresh(path, "it", "new\n", check=True)
    assert not documents.refresh(path, "it", "new\n", check=False)
    assert path.read_text(encoding="utf-8") == "a\n<!-- it: here -->\nnew\n<!-- /it -->\nb\n"
    assert documents.refresh(path, "it", "new\n", check=True)
    with pytest.raises(ValueError, match="0 places for that"):
        documents.refresh(path, "that", "new\n", check=True)
