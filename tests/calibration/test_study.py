"""The logic of `calibration/products.py` on tiny sizes: structure, values and tables; never a timing."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[1] / "calibration"
NAMES = ("children", "measuring", "rows", "figures", "contenders", "product_runs", "products")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    known = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        del sys.modules[name]
    sys.modules.update(known)


@pytest.fixture
def tiny(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The script with sizes for a test, its children in this process, and without what would be compiled."""
    runs = modules["product_runs"]
    scale = dataclasses.replace(
        runs.QUICK, n=60, d=(2,), rounds=2, seconds=0.0, sizes=(40, 80), dimensions=(1, 3), columns=(1, 11),
        grown=(20, 40), turns=1, held=(100,), least=0.0,
    )  # fmt: skip
    monkeypatch.setattr(modules["products"], "QUICK", scale)
    monkeypatch.setattr(modules["contenders"], "TILES", {"cpu": ((16, 32), 1)})
    monkeypatch.setattr(runs, "in_child", lambda module, function, *args, **_: getattr(runs, function)(*args))
    return modules


@pytest.fixture
def written(tiny: dict[str, ModuleType], tmp_path: Path) -> Path:
    path = tmp_path / "products.json"
    assert tiny["products"].main(["--quick", "--output", str(path)]) == 0
    return path


def test_every_section_is_written_and_has_a_table(tiny: dict[str, ModuleType], written: Path) -> None:
    found = json.loads(written.read_text(encoding="utf-8"))
    assert {"schema", "date", "host", "versions", "device", *tiny["products"].SECTIONS} <= set(found)
    assert [shown.row_count for shown in tiny["products"].tables(found)][1:] == [len(found["regret"]["rows"]), 2, 4]
    main = found["main"]
    assert main["keops"] == "nothing is compiled in a quick run"
    assert {(c["family"], c["dtype"], c["same"]) for c in main["cases"]} == {
        (family, dtype, same)
        for family in ("rbf", "matern52")
        for dtype in ("float32", "float64")
        for same in (True, False)
    }
    for case in main["cases"]:
        assert {"the matrix", "stock", "tiled", case["chosen"]} <= set(case["seconds"])
        assert ("tiled-symmetric" in case["seconds"]) == case["same"]
        assert 0 < case["floor"]["half"] <= case["floor"]["seconds"]
    assert all(row["regret"] >= 1 for row in found["regret"]["rows"])
    assert found["regret"]["summary"]["worst"] == max(row["regret"] for row in found["regret"]["rows"])
    assert {row["n"] for row in found["scaling"]["rows"]} == {20, 40}
    assert all(row["bytes"] >= 0 and row["candidates"] for row in found["memory"]["rows"])


def test_a_run_of_one_section_keeps_the_others_of_the_same_host(tiny: dict[str, ModuleType], written: Path) -> None:
    before = json.loads(written.read_text(encoding="utf-8"))
    assert tiny["products"].main(["--quick", "--sections", "scaling", "--output", str(written)]) == 0
    after = json.loads(written.read_text(encoding="utf-8"))
    assert after["main"] == before["main"]
    written.write_text(json.dumps({**after, "versions": {}}), encoding="utf-8")
    assert tiny["products"].main(["--quick", "--sections", "scaling", "--output", str(written)]) == 0
    assert "main" not in json.loads(written.read_text(encoding="utf-8"))


def test_unknown_sections_are_bad_usage(tiny: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        tiny["products"].main(["--sections", "man"])
    assert stop.value.code == 2
    assert "man" in capsys.readouterr().err


def test_what_would_last_too_long_is_left_out_and_told(tiny: dict[str, ModuleType]) -> None:
    runs = tiny["product_runs"]
    scale = dataclasses.replace(tiny["products"].QUICK, dimensions=(1,), columns=(11,), bound=0.0)
    found = runs.run_regret(scale, "cpu", lambda line: None)
    assert {row["n"] for row in found["rows"]} == {40}
    assert len(found["skipped"]) == 1
    assert tiny["products"].regret_table(found).caption == "1 left out as too long"


@pytest.mark.parametrize("family", ["rbf", "matern52"])
@pytest.mark.parametrize("same", [True, False])
def test_the_matrix_itself_is_multiplied_rightly(modules: dict[str, ModuleType], family: str, same: bool) -> None:
    of = modules["contenders"].case(family, 50, 3, 5, same, torch.float64, "cpu")
    with torch.no_grad():
        expected = of.kernel(of.x1, of.x2).to_dense() @ of.rhs
        torch.testing.assert_close(modules["contenders"].whole(of)(), expected)


def test_all_layouts_give_one_product(modules: dict[str, ModuleType]) -> None:
    k, v = torch.rand(7, 9, dtype=torch.float64), torch.rand(9, 5, dtype=torch.float64)
    for way in modules["contenders"].layouts(v).values():
        torch.testing.assert_close(way(k), k @ v)


def test_the_floor_takes_the_best_of_each_piece(modules: dict[str, ModuleType]) -> None:
    contenders = modules["contenders"]
    pieces: dict[str, Any] = {
        name: (lambda: None, 10)
        for name in ("exp, 1", "exp, 2", "distance, 1", "product, rows, 1", "product, columns, 1")
    }
    floor = contenders.floor_of(dict(zip(pieces, (10.0, 20.0, 30.0, 50.0, 40.0), strict=True)), pieces)
    assert floor == (1.0, 3.0, 4.0)
    assert (floor.seconds(1, False), floor.seconds(1, True), floor.half(1)) == (8.0, 6.0, 4.0)


def test_what_does_not_run_is_left_out_and_told(modules: dict[str, ModuleType]) -> None:
    found, failed = modules["product_runs"].working({"zero": lambda: 1 / 0, "one": lambda: 1})
    assert list(found) == ["one"]
    assert failed == {"zero": "ZeroDivisionError: division by zero"}


def test_rounds_begin_with_each_in_turn(modules: dict[str, ModuleType]) -> None:
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    taken = modules["contenders"].interleaved(steps, 3, 1e9, 0.0, lambda: None)
    assert calls == [*"aabbcc", *"abc", *"acb", *"cab"]
    assert all(len(seconds) == 3 for seconds in taken.values())
    assert len(modules["contenders"].interleaved(steps, 3, 0.0, 0.0, lambda: None)["a"]) == 1


def test_without_pykeops_the_reason_is_told(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = modules["contenders"]
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    assert contenders.without_keops() == "pykeops is not installed"
