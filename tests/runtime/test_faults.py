"""The deliberate faults of the tortures: each text that they replace stands in the package exactly once."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
TORTURES = sorted(path.stem for path in (HERE / "torture").glob("t[0-9]*.py"))


@pytest.mark.parametrize("name", TORTURES)
def test_faults_fit_the_code(name, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE / "torture"))
    mutations = importlib.import_module(name).MUTATIONS
    assert mutations
    for mutation in mutations:
        text = (HERE.parent / "autokern" / mutation.file).read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, f"{name}: {mutation.name}"
