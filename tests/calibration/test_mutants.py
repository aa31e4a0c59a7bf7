"""mutants.py: what is drawn, where it is written, and which cases are run for it."""

import ast
import json
from argparse import Namespace

import mutants
import pytest

SOURCE = '''"""é"""
LIMIT = 3


def of(x, n: int | None = 2):
    """Words."""
    while not x and n < 5:
        n += 1
        print("é", -n)
    return x * 0.5
'''


def test_each_mutant_stands_where_it_was_and_no_other_line_moves(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "one.py").write_text(SOURCE, encoding="utf-8")
    found = mutants.mutants(tmp_path, ["part"])
    assert {one["kind"] for one in found} == {
        "comparison", "operator", "condition", "constant", "returned value", "statement",
    }  # fmt: skip
    for one in found:
        text = mutants.written(SOURCE, one)
        ast.parse(text)
        changed = [
            k for k, pair in enumerate(zip(SOURCE.splitlines(), text.splitlines(), strict=True), 1) if len({*pair}) > 1
        ]
        assert changed == [one["span"][0]]
        assert one["span"][0] > 6


def test_each_test_is_tried_before_one_of_them_is_tried_twice():
    cases = [("a::t[1]", 1.0), ("a::t[2]", 2.0), ("b::u", 3.0), ("c::v", 1.0)]
    found = {"cases": cases, "lines": {"one.py:7": "7"}}
    mutant = {"file": "one.py", "span": [7, 0, 7, 1]}
    assert mutants.selection(found, mutant, 60) == ["a::t[1]", "b::u", "a::t[2]"]
    assert mutants.selection(found, mutant, 4) == ["a::t[1]", "b::u"]
    assert mutants.selection(found, {**mutant, "span": [8, 0, 8, 1]}, 60) == []


@pytest.mark.parametrize(("cases", "expected"), [("ab", "b"), ("a", None), ("ba", "b")])
def test_a_case_that_fails_without_the_mutant_kills_nothing(tmp_path, monkeypatch, cases, expected):
    package, out = tmp_path / "autokern", tmp_path / "out.json"
    (package / "part").mkdir(parents=True)
    (package / "part" / "one.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "map.json").write_text("{}")
    monkeypatch.setattr(mutants, "selection", lambda *_: list(cases))

    def killer(where, names, seconds):
        failing = "a" if where == package else "ab"
        return next((name for name in names if name in failing), None)

    monkeypatch.setattr(mutants, "killer", killer)
    told = {"map": tmp_path / "map.json", "rest": [out], "package": package, "packages": ["part"], "again": None}
    mutants.run(Namespace(**told, seed=0, count=2, seconds=1))
    assert [one["killed"] for one in json.loads(out.read_text())["mutants"]] == [expected] * 2
