"""Mutants of the package, each run against the test cases that reach its lines: which of them the tests kill.

python calibration/mutants.py map MAP.json tests/density tests/hooks    # the lines that each case reaches, by a tracer
python calibration/mutants.py run MAP.json OUT.json --packages density hooks --count 60 --seed 1
python calibration/mutants.py run MAP.json OUT.json --again BEFORE.json    # the same mutants, by other tests
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

OPERATORS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
OPTIONS = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--tb=no", "--timeout=60"]


def mutations(node: ast.AST) -> Iterator[tuple[str, str]]:
    """What a node is replaced by, each with the kind of the mutation."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield "comparison", f"({ast.unparse(ast.Compare(left, [OPERATORS[type(op)]()], [right]))})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            yield "operator", f"({ast.unparse(ast.BinOp(left, OPERATORS[type(op)](), right))})"
        case ast.BoolOp(op=op, values=values):
            yield "condition", f"({ast.unparse(ast.BoolOp(OPERATORS[type(op)](), values))})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "operator", f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", repr(value + 1)
        case ast.Return(value=ast.expr()):
            yield "returned value", "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            yield "statement", "pass"


def mutants(root: Path, packages: list[str]) -> list[dict[str, Any]]:
    """Every mutant of the functions in the packages: where it is and what it writes there."""
    found = {}
    for path in sorted(file for package in packages for file in (root / package).rglob("*.py")):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        file = str(path.relative_to(root))
        for node in (node for function in functions for part in function.body for node in ast.walk(part)):
            for kind, text in mutations(node):
                span = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
                found[path, span, kind] = {"file": file, "span": span, "kind": kind, "text": text}
    return list(found.values())


def written(source: str, mutant: dict[str, Any]) -> str:
    """The source of a file with the mutant in it; columns count bytes."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    first, start, last, end = mutant["span"]
    lines[first - 1 : last] = [lines[first - 1][:start] + mutant["text"].encode() + lines[last - 1][end:]]
    return b"".join(lines).decode()


class Traced:
    """A pytest plugin that notes the lines of the package that each case reaches, and its seconds."""

    def __init__(self, root: Path) -> None:
        self._root, self._now = f"{root.resolve()}/", set[str]()
        self.reached: dict[str, int] = defaultdict(int)
        self.cases: list[tuple[str, float]] = []

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._root):
            return None
        self._now.add(f"{frame.f_code.co_filename.removeprefix(self._root)}:{frame.f_lineno}")
        return self._trace

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._now.clear()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        began = time.perf_counter()
        yield
        for place in self._now.copy():
            self.reached[place] |= 1 << len(self.cases)
        self.cases.append((item.nodeid, time.perf_counter() - began))


class Chosen:
    """A pytest plugin that runs the given cases, and writes down the first that fails."""

    def __init__(self, names: list[str], out: Path) -> None:
        self._names, self._out = set(names), out

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._names]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._out.exists():
            self._out.write_text(report.nodeid)


def selection(found: dict[str, Any], mutant: dict[str, Any], seconds: float) -> list[str]:
    """The cases that reach a mutant, in turn of each test the quickest, as many as the seconds allow."""
    mask, tests = 0, defaultdict(list)
    for line in range(mutant["span"][0], mutant["span"][2] + 1):
        mask |= int(found["lines"].get(f"{mutant['file']}:{line}", "0"), 16)
    for k, (name, took) in enumerate(found["cases"]):
        if mask >> k & 1:
            tests[name.partition("[")[0]].append((took, name))
    chosen, spent = [], 0.0
    for _, took, name in sorted((turn, *case) for each in tests.values() for turn, case in enumerate(sorted(each))):
        if (spent := spent + took) <= seconds or not chosen:
            chosen.append(name)
    return chosen


def killer(package: Path, names: list[str], seconds: int) -> str | None:
    """The first of the cases that fails with a package, run in a fork that has the libraries loaded."""
    with tempfile.TemporaryDirectory() as folder:
        out, code = Path(folder, "failed"), None
        if not (child := os.fork()):
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (3 * seconds + 60, 3 * seconds + 60))
                os.environ["PYTHONPATH"] = str(package.parent)
                sys.path.insert(0, str(package.parent))
                files = {name.partition("::")[0] for name in names}
                with contextlib.redirect_stdout(io.StringIO()):
                    code = pytest.main([*OPTIONS, "-x", *sorted(files)], plugins=[Chosen(names, out)])
            finally:
                if code not in (0, 1):
                    out.write_text(f"pytest ended with {code}")
                os._exit(0)
        limit = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        return "time limit" if limit else out.read_text() if out.exists() else None


def run(told: argparse.Namespace) -> None:
    __import__("botorch")  # and what it imports, once for all forks
    found, results = json.loads(told.map.read_text()), []
    drawn = random.Random(told.seed).sample(mutants(told.package, told.packages), told.count)
    drawn = json.loads(told.again.read_text())["mutants"] if told.again else drawn
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "autokern")
        shutil.copytree(told.package, package)
        for mutant in drawn:
            names, path = selection(found, mutant, told.seconds), package / mutant["file"]
            source = path.read_text()
            path.write_text(written(source, mutant))
            by = killer(package, names, told.seconds) if names else None
            while by in names and killer(told.package.resolve(), [by], told.seconds):  # it fails without the mutant
                names.remove(by)
                by = killer(package, names, told.seconds) if names else None
            path.write_text(source)
            results.append({**mutant, "cases": len(names), "killed": by})
            killed = sum(bool(r["killed"]) for r in results)
            Path(told.rest[0]).write_text(json.dumps({"killed": killed, "of": len(results), "mutants": results}))
            print(f"{mutant['file']}:{mutant['span'][0]} {mutant['kind']}: {by} ({len(names)} cases)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("map", "run"))
    parser.add_argument("map", type=Path)
    parser.add_argument("rest", nargs="+", help="the tests of a map; the file that a run writes")
    parser.add_argument("--package", type=Path, default=Path("autokern"))
    parser.add_argument("--again", type=Path)
    parser.add_argument("--packages", nargs="+", default=["density"])
    for name, default in (("count", 60), ("seed", 0), ("seconds", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    told = parser.parse_args()
    del sys.path[0]  # this folder, whose modules have names of those of tests
    if told.command == "run":
        return run(told)
    sys.path.insert(0, str(told.package.resolve().parent))
    plugin = Traced(told.package)
    pytest.main([*OPTIONS, *told.rest], plugins=[plugin])
    found = {"cases": plugin.cases, "lines": {place: f"{mask:x}" for place, mask in plugin.reached.items()}}
    told.map.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
