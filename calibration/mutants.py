"""Mutants of the package, each run against the tests that reach its line: which of them the tests kill.

python calibration/mutants.py map MAP.json tests/gp tests/hooks    # what each case of these tests reaches
python calibration/mutants.py run MAP.json OUT.json --packages gp hooks --count 60 --seed 1
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
OPTIONS = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--tb=no"]


def mutations(node: ast.AST) -> Iterator[tuple[str, str]]:
    """What a node is replaced by, each with the kind of the mutation."""
    text = ast.unparse(node)
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield "comparison", f"({ast.unparse(ast.Compare(left, [COMPARISONS[type(op)]()], [right]))})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            yield "operator", f"({ast.unparse(ast.BinOp(left, OPERATORS[type(op)](), right))})"
        case ast.BoolOp(op=op, values=values):
            yield "condition", f"({ast.unparse(ast.BoolOp(ast.Or() if type(op) is ast.And else ast.And(), values))})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "operator", f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value)):
            yield "off by one", str(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", repr(2 * value + 1)
        case ast.Return(value=ast.expr(value=held)) if held is not None:
            yield "returned value", "return None"
        case ast.Return(value=ast.expr()):
            yield "returned value", "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            yield "statement", "pass"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "condition", f"({ast.unparse(ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse))})"
        case ast.expr() if getattr(node, "is_test", False) and not isinstance(node, ast.Compare | ast.BoolOp):
            yield "condition", f"(not ({text}))"


def mutants(root: Path, packages: list[str]) -> list[dict[str, Any]]:
    """Every mutant of the functions in the packages: where it is and what it writes there."""
    found = []
    for path in sorted(file for package in packages for file in (root / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        left = [(tree, False)]
        while left:
            node, inside = left.pop()
            if inside and hasattr(node, "lineno"):
                span = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
                told = {"file": str(path.relative_to(root)), "span": span, "was": ast.unparse(node)[:120]}
                found += [{**told, "kind": kind, "text": text} for kind, text in mutations(node)]
            if isinstance(node, ast.If | ast.While):
                node.test.is_test = True  # type: ignore[attr-defined]
            inside = inside or isinstance(node, FUNCTIONS)
            for name, value in ast.iter_fields(node):
                if name not in (
                    "annotation",
                    "returns",
                    "decorator_list",
                    "args" if isinstance(node, FUNCTIONS) else "",
                ):
                    left += [
                        (v, inside) for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST)
                    ]
    return found


def written(source: str, mutant: dict[str, Any]) -> str:
    """The source of a file with the mutant in it; columns count bytes."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    first, start, last, end = mutant["span"]
    before, after = lines[first - 1][:start], lines[last - 1][end:]
    lines[first - 1 : last] = [before + mutant["text"].encode() + after]
    return b"".join(lines).decode()


class Traced:
    """A pytest plugin that notes the lines of the package that each case reaches, and its seconds."""

    def __init__(self, root: Path) -> None:
        self._root, self._ours = f"{root.resolve()}/", dict[CodeType, str]()
        self._now: set[tuple[str, int]] = set()
        self.reached: dict[tuple[str, int], int] = defaultdict(int)
        self.cases: list[tuple[str, float]] = []

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if (name := self._ours.get(code)) is None:
            full = code.co_filename
            name = self._ours[code] = full.removeprefix(self._root) if full.startswith(self._root) else ""
        return self._line(name) if name else None

    def _line(self, name: str) -> Any:
        def line(frame: FrameType, event: str, _: object) -> Any:
            self._now.add((name, frame.f_lineno))
            return line

        return line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._now.clear()
        threading.settrace(self._call)
        sys.settrace(self._call)
        began = time.perf_counter()
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            for place in self._now:
                self.reached[place] |= 1 << len(self.cases)
            self.cases.append((item.nodeid, time.perf_counter() - began))


class Chosen:
    """A pytest plugin that runs the given cases in their order, and writes down the first that fails."""

    def __init__(self, order: list[str], out: Path) -> None:
        self._order, self._out = {name: k for k, name in enumerate(order)}, out

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self._order), key=lambda item: self._order[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._out.exists():
            self._out.write_text(report.nodeid)


def selection(found: dict[str, Any], mutant: dict[str, Any], seconds: float) -> list[str]:
    """The cases that reach a mutant, in turn of each test the quickest, as many as the seconds allow; by file."""
    mask = 0
    for line in range(mutant["span"][0], mutant["span"][2] + 1):
        mask |= int(found["lines"].get(f"{mutant['file']}:{line}", "0"), 16)
    tests = defaultdict(list)
    for k, (name, took) in enumerate(found["cases"]):
        if mask >> k & 1:
            tests[name.partition("[")[0]].append((took, name))
    turns = [(turn, *case) for cases in tests.values() for turn, case in enumerate(sorted(cases))]
    chosen, spent = [], 0.0
    for _, took, name in sorted(turns):
        if chosen and (spent := spent + took) > seconds:
            break
        chosen.append(name)
    files = list(dict.fromkeys(name.partition("::")[0] for name in chosen))
    return sorted(chosen, key=lambda name: files.index(name.partition("::")[0]))


def inside(package: Path, order: list[str], out: Path) -> None:
    """Run the cases with a package in this process, a fork."""
    os.setsid()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.environ["PYTHONPATH"] = str(package.parent)
    sys.path.insert(0, str(package.parent))
    files = dict.fromkeys(name.partition("::")[0] for name in order)
    code = pytest.main([*OPTIONS, "-x", *files], plugins=[Chosen(order, out)])
    if code not in (0, 1) and not out.exists():
        out.write_text(f"collection of {order[0].partition('::')[0]}")


def killer(package: Path, order: list[str], seconds: float) -> str | None:
    """The first of the cases that fails with a package, run in a fork that has the libraries loaded."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "failed")
        if not (child := os.fork()):
            try:
                inside(package, order, out)
            finally:
                os._exit(0)
        end = time.monotonic() + 3 * seconds + 60
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "time limit"
            time.sleep(0.05)
        return out.read_text() if out.exists() else None


def run(options: argparse.Namespace) -> None:
    for name in ("torch", "gpytorch", "botorch", "hypothesis", "scipy.optimize"):
        __import__(name)
    found = json.loads(options.map.read_text())
    everything = mutants(options.package, options.packages)
    drawn = random.Random(options.seed).sample(everything, options.count)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "autokern")
        shutil.copytree(options.package, package)
        for mutant in drawn:
            order = selection(found, mutant, options.seconds)
            source = (package / mutant["file"]).read_text()
            (package / mutant["file"]).write_text(written(source, mutant))
            by = killer(package, order, options.seconds) if order else None
            (package / mutant["file"]).write_text(source)
            results.append({**mutant, "cases": len(order), "killed": by})
            text = {"of": len(everything), "killed": sum(bool(r["killed"]) for r in results), "mutants": results}
            options.output.write_text(json.dumps(text, indent=1) + "\n")
            print(f"{mutant['file']}:{mutant['span'][0]} {mutant['kind']}: {by} ({len(order)} cases)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("map", "run"):
        command = commands.add_parser(name)
        command.add_argument("map", type=Path)
        command.add_argument("--package", type=Path, default=Path("autokern"))
    commands.choices["map"].add_argument("tests", nargs="+")
    options = commands.choices["run"]
    options.add_argument("output", type=Path)
    options.add_argument("--packages", nargs="+", required=True)
    for name, default in (("count", 60), ("seed", 0), ("seconds", 60)):
        options.add_argument(f"--{name}", type=int, default=default)
    told = parser.parse_args()
    del sys.path[0]  # this folder, whose modules have names of those of tests
    if told.command == "run":
        return run(told)
    sys.path.insert(0, str(told.package.resolve().parent))
    plugin = Traced(told.package)
    pytest.main([*OPTIONS, *told.tests], plugins=[plugin])
    lines = {f"{file}:{line}": f"{mask:x}" for (file, line), mask in plugin.reached.items()}
    told.map.write_text(json.dumps({"cases": plugin.cases, "lines": lines}))


if __name__ == "__main__":
    main()
