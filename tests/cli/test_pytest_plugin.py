"""``pytest -p autokern.pytest`` serves a test run and says so in a line, with workers of pytest-xdist too."""

import re

import pytest
from support.programs import python

TESTS = """
import autokern, gpytorch, pytest, torch

@pytest.mark.parametrize("n", [30, 40])
def test_kernel(n):
    assert autokern.is_enabled() == {on}
    gpytorch.kernels.RBFKernel()(torch.rand(n, 2)).to_dense()
"""


def told(folder, *options, on=True, **environment):
    (folder / "test_theirs.py").write_text(TESTS.format(on=on))
    command = ["-m", "pytest", "-q", "-p", "autokern.pytest", "-p", "no:cacheprovider", *options]
    ended = python(*command, cwd=folder, AUTOKERN_CALIBRATE="never", **environment)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("options", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)])
def test_tests_are_served_and_calls_counted(tmp_path, options):
    status, text = told(tmp_path, *options)
    assert status == 0, text
    found = re.search(r"autokern: (\d+) calls served by candidates, (\d+) by the library's own code\n", text)
    assert sum(map(int, found.groups())) == 2, text


@pytest.mark.slow
def test_why_it_is_off_and_a_bad_variable(tmp_path):
    status, text = told(tmp_path, on=False, AUTOKERN="0")
    assert status == 0, text
    assert "autokern: 0 calls served by candidates, 0 by the library's own code (AUTOKERN=0 keeps it off)" in text
    status, text = told(tmp_path, AUTOKERN_BUDGET="soon")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert text.startswith("ERROR: ")
    assert "AUTOKERN_BUDGET" in text
