"""Tests of the scripts in `calibration/`, which are imported as they import each other."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "calibration"))


@pytest.fixture
def refreshed(tmp_path):
    """A maker of documents: what a script writes of results between its marks, first seen to be missing."""

    def make(script, results: dict[str, object], name: str) -> str:
        document, stored = tmp_path / "page.md", tmp_path / "results.json"
        document.write_text(f"before\n<!-- {name}: by a script -->\nold\n<!-- /{name} -->\nafter\n")
        stored.write_text(json.dumps(results))
        ends = [
            script.main([way, str(document), "--output", str(stored)]) for way in ("--check", "--readme", "--check")
        ]
        assert ends == [1, 0, 0]
        return document.read_text()

    return make
