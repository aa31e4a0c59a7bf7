"""What the docs show and what the package ships is what the scripts write."""

import importlib
import logging
import re
import struct
from pathlib import Path

import ablation
import baselines
import example
import gains
import machines
import msgspec
import picture
import pytest
import ship
import study

from autokern.core.decision import Solved
from autokern.core.problem import Problem
from autokern.tuning import chooser
from autokern.tuning.chooser import Shipped, unpacked
from autokern.tuning.forest import UNKNOWN
from autokern.tuning.profile import Profile, Timing, Trial

ROOT = Path(__file__).parents[2]
SHIPPED = chooser.recorded  # trees of a host correct those that the package ships
CHECKED = re.findall(r"^python calibration/(\w+)\.py --check (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
WITHOUT_OPTIONS = ("stacks", "third_parties")


@pytest.mark.parametrize("script", [ablation, example, gains, machines, study], ids=lambda module: module.__name__)
def test_what_the_docs_say_of_recorded_hosts_is_what_the_scripts_write(script, one_thread, monkeypatch):
    monkeypatch.setattr(chooser, "recorded", SHIPPED)
    assert script.main(["--check"]) == 0, f"run calibration/{script.__name__}.py"


@pytest.mark.parametrize(("name", "document"), [one for one in CHECKED if one[0] not in WITHOUT_OPTIONS])
def test_a_document_holds_the_recorded_figures_and_other_ones_are_told(name, document, tmp_path):
    script, page = importlib.import_module(name), tmp_path / "page.md"
    marks = re.compile(r"(<!-- ([^:]+): [^>]*-->\n).*?(<!-- /\2 -->)", re.DOTALL)
    emptied, blocks = marks.subn(r"\1old\n\3", (ROOT / document).read_text(encoding="utf-8"))
    assert blocks
    assert script.main(["--check", str(ROOT / document)]) == 0, f"run calibration/{name}.py --readme {document}"
    page.write_text(emptied, encoding="utf-8")
    assert script.main(["--check", str(page)]) == 1
    assert page.read_text(encoding="utf-8") == emptied


@pytest.mark.parametrize("line", [
    "density/array_density.py: step_off | |", "density/no.py: loss | |",
    "density/array_density.py: loss | nothing_like_it |", "auto.py: x | |",
])  # fmt: skip
def test_a_way_that_the_code_does_not_take_is_told(line, monkeypatch, capsys):
    monkeypatch.setattr(picture, "WAYS", {"a way": picture.steps(f"  {line} does something")})
    assert picture.main(["--check"]) == 1
    assert line.partition(":")[0].partition("/")[0] in capsys.readouterr().out


def test_reports_of_densities_are_kept():
    reports = baselines.Reports()
    for args in ((1000, Solved(1e-6, 9, "vecchia", 10)), ("other",)):
        reports.emit(logging.LogRecord("autokern", logging.DEBUG, "", 0, "%s", args, None))
    assert reports.found == [{"residual": 1e-6, "products": 9}]


@pytest.fixture
def with_a_gpu():
    """The profile of a machine that does not exist: decompositions below 512 columns are faster on its CPU."""
    trials = []
    for n in (64, 128, 256, 1024, 2048):
        cpu, there = 1e-9 * n**2.5, 512e-9 * n**1.5
        stock, other, name = (cpu, there, "native") if n <= 128 else (there, cpu, "cpu")
        timings = {"stock": Timing(stock), name: Timing(other, other / stock, 0.01, 5)}
        trials.append(Trial(Problem(op="qr", m=n, n=n, device="cuda"), timings))
    batch = {"stock": Timing(8.0), "choleskyqr2": Timing(0.1, 0.0125, 0.01, 5)}
    trials.append(Trial(Problem(op="qr", m=3, n=3, batch=8192, device="cuda", dtype="float32"), batch))
    gpu = {"kind": "cuda", "name": "A GPU"}
    fields = {"cpu": {"model": "A CPU", "threads": 4}, "accelerators": [gpu]}
    fields["versions"] = dict.fromkeys(("torch", "gpytorch", "linear_operator"), "1.0")
    return Profile(host=fields, trials=trials, created="2026-01-01T00:00:00Z")


def test_the_page_of_a_machine_with_a_gpu_says_what_thresholds_cost(with_a_gpu):
    text = "\n".join(machines.section("a-gpu", with_a_gpu))
    assert "## A GPU, A CPU, 4 threads" in text
    assert "| `qr` | cuda | float32 | 8192 × 3 × 3 | choleskyqr2 | 8e+03 | 80.00 |" in text
    assert machines.rule_costs(with_a_gpu.trials, 512, "float64") == [1.0] * 5
    assert machines.rule_costs(with_a_gpu.trials, 128, "float64") == [1, 1, pytest.approx(2), 1, 1]
    assert machines.rule_costs(with_a_gpu.trials, 2048, "float64") == [1, 1, 1, pytest.approx(2), pytest.approx(4)]
    assert "| CPU up to 2048 (before linear_operator 0.5.3) | float64 | 5 | 1.52 | 4.0 |" in text
    assert "| CPU up to 128 (since) | float64 | 5 | 1.15 | 2.0 |" in text


def test_the_package_ships_what_the_recorded_hosts_measured(monkeypatch):
    assert ship.main(["--check"]) == 0
    monkeypatch.setattr(ship, "LARGEST", ship.FILE.stat().st_size // 2)  # last digits change what compresses well
    assert ship.main(["--check"]) == 1


@pytest.fixture(scope="module")
def shipped() -> Shipped:
    return msgspec.msgpack.decode(ship.FILE.read_bytes(), type=Shipped)


def test_the_file_says_below_which_sizes_stock_serves(shipped):
    assert all(shipped.forests[f"{op}@cpu"].floor > 1000 for op in ("cholesky", "qr"))


def test_the_check_of_the_file_sees_other_hosts_other_trials_and_other_trees(shipped):
    assert ship.same(shipped, msgspec.msgpack.decode(ship.FILE.read_bytes(), type=Shipped))
    assert not ship.same(msgspec.structs.replace(shipped, hosts=shipped.hosts[1:]), shipped)
    less = msgspec.msgpack.decode(ship.pack([Profile(trials=unpacked(shipped.trials["qr@cpu"])[1:])]), type=Shipped)
    changed = shipped.trials | {"qr@cpu": less.trials["qr@cpu"]}
    assert not ship.same(shipped, msgspec.structs.replace(shipped, trials=changed))
    forest = shipped.forests["qr@cpu"]
    numbers = struct.unpack(f"<{len(forest.base.values) // 2}h", forest.base.values)
    slower = struct.pack(f"<{len(numbers)}h", *(n if n == UNKNOWN else n + 50 for n in numbers))
    other = msgspec.structs.replace(forest, base=msgspec.structs.replace(forest.base, values=slower))
    changed = shipped.forests | {"qr@cpu": other}
    assert not ship.same(shipped, msgspec.structs.replace(shipped, forests=changed))
    left = {key: forest for key, forest in shipped.forests.items() if key != "qr@cpu"}
    assert not ship.same(shipped, msgspec.structs.replace(shipped, forests=left))
