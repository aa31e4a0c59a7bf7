"""programs.py and third_parties.py: scripts in fresh processes, on all sides, as a table; the scripts are whole."""

import ast

import programs
import pytest
import third_parties

SCRIPT = '''"""GPyTorch: a program that needs no model."""

import sys

assert "torch" not in sys.modules or "autokern" in sys.modules
print("said on the way")
print("final", 1.5, 2.0 + 1e-9 * ("autokern" in sys.modules))
'''


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "gp_nothing.py"
    path.write_text(SCRIPT)
    return path


def test_a_run_is_a_whole_process(script, tmp_path):
    found = programs.run(script, "off", tmp_path)
    assert found["final"] == [1.5, 2.0]
    assert found["cpu"] > 0
    assert 0 < found["seconds"] < 60
    assert found["peak"] > 2**20


def test_a_program_that_fails_or_says_nothing_is_an_error(tmp_path):
    failing, silent = tmp_path / "one.py", tmp_path / "two.py"
    failing.write_text("raise ValueError('it broke')")
    silent.write_text("print('done')")
    with pytest.raises(RuntimeError, match="it broke"):
        programs.run(failing, "off", tmp_path)
    with pytest.raises(RuntimeError, match="ended with 0"):
        programs.run(silent, "off", tmp_path)


def test_sides_are_compared_pair_by_pair(monkeypatch, tmp_path, script):
    asked = []

    def run(path, side, home, environment=None):
        asked.append((side, home.name, bool(environment)))
        seconds = {"off": 6.0, "on": 2.0, "new": 3.0}[side]
        final = {"off": [1.0, 2.0], "on": [1.0, 2.002], "new": [1.0, 2.0]}[side]
        return {"seconds": seconds, "cpu": 2 * seconds, "peak": 2**20 * (3 if side == "off" else 5), "final": final}

    monkeypatch.setattr(programs, "run", run)
    home = tmp_path / "home"
    home.mkdir()
    found = programs.measured(script, 3, home)
    assert found["on"]["ratio"] == pytest.approx(3)
    assert found["new"]["ratio"] == pytest.approx(2)
    assert found["on"]["difference"] == pytest.approx(1e-3, rel=1e-2)
    assert (found["stock_difference"], found["what"]) == (0, "a program that needs no model")
    assert [side for side, *_ in asked].count("off") == 5  # three pairs, and two that round otherwise
    assert len({home for side, home, _ in asked if side == "new"}) == programs.FIRST_RUNS
    line = programs.line("gp_nothing", found)
    assert line.startswith("| GPyTorch: a program that needs no model | 6.00 s | 2.00 s | 3.00×")
    assert "+2 MiB" in line


def test_there_are_enough_programs_and_none_of_them_knows_autokern():
    found = programs.programs()
    names = [name[:2] for name in found]
    assert min(names.count("bo"), names.count("gp")) >= 8
    for path in found.values():
        text = path.read_text()
        assert text.startswith('"""')
        assert "autokern" not in text
        assert 'print("final"' in text


def test_every_program_is_of_a_package_that_is_known():
    for script in (third_parties.HERE / "third").glob("*.py"):
        assert script.stem.partition("_")[0] in third_parties.PACKAGES
        assert ast.get_docstring(ast.parse(script.read_text()))
        assert script.read_text().splitlines()[-1].startswith('print("final"')


@pytest.mark.parametrize(
    ("ours", "count"), [([5.0, 1.0, 2.0], 3), ([5.0 + 1e-6, 1.0, 2.0], 3), ([5.0, 1.1, 2.0], 1), ([4.0, 1.0, 2.0], 0)]
)
def test_points_agree_until_the_first_that_differs(ours, count):
    assert third_parties.alike(ours, [5.0, 1.0, 2.0]) == count


@pytest.mark.slow
def test_a_program_is_run_without_and_with_autokern(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("import gpytorch\nk = gpytorch.kernels.RBFKernel()\nprint('final', 1.5, 2)\n")
    assert third_parties.run(script, on=False)["final"] == [1.5, 2.0]
    assert third_parties.run(script, on=False, by=1e-15)["final"] == [1.5, 2.0]
    script.write_text("raise ValueError('no')")
    with pytest.raises(RuntimeError, match="ValueError: no"):
        third_parties.run(script, on=False)
