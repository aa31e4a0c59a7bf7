"""Packages that build on BoTorch: what their table says of the programs in `third/`."""

from __future__ import annotations

import ast

import pytest
import third_parties


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
