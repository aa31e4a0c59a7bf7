"""T14: on hundreds of changed copies of the libraries, autokern tells stock's numbers or stays out."""

import json
from pathlib import Path

import pytest
from support.programs import PATH, python


@pytest.mark.timeout(7300)
def test_on_a_changed_library_numbers_are_stocks_and_what_is_relied_on_is_recorded(in_earnest, capsys):
    """In a process of its own, which has not imported the libraries, and whose forks have one thread each."""
    here, size = Path(__file__).parent, "full" if in_earnest else "ci"
    variables = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
    done = python(here / "releases.py", size, timeout=7200, PYTHONPATH=":".join([str(here), *PATH]), **variables)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    with capsys.disabled():
        print(f"\n{found['told']}")
    assert (found["unrecorded"], found["wrong"]) == ([], [])
    effects = {"silently wrong", "import crashes", "call crashes", "fine"}
    assert sum(n for words in found["told"].values() for word, n in words.items() if word in effects) >= (
        1000 if in_earnest else 190
    )
