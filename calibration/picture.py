"""The picture and the tables of `docs/ten-minutes.md`: one training step and one prediction, function by function.

`TRAINING` and `PREDICTION` list the functions. Nothing of the package is imported: the source of each function is
parsed, and must name what its line says that it uses. The columns are the packages of the import contract in
`pyproject.toml`. A line that is not true of the code is an error.

    python calibration/picture.py
"""

from __future__ import annotations

import argparse
import ast
import functools
import html
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import documents

ROOT = Path(__file__).parents[1]
DOCUMENT, PICTURE, BLOCK = ROOT / "docs" / "ten-minutes.md", ROOT / "docs" / "how-it-works.svg", "steps"
LEFT, COLUMN, TEXT, ROW, HEAD, WIDTH = 24, 34, 480, 40, 104, 942
"""Pixels: of the first column, between columns, of the text, of a step, of the packages' names, of the whole."""
LONGEST = 64
"""Characters that fit beside a step."""
STYLE = """
svg { background: #fff; --ink: #222; --faint: #777; --line: #ddd; --way: #3949ab; --band: #eef0fa }
@media (prefers-color-scheme: dark) {
  svg { background: #1e2129; --ink: #eee; --faint: #aaa; --line: #3c4049; --way: #9fa8da; --band: #2a2e3d }
}
text { font: 14px system-ui, sans-serif; fill: var(--ink) }
.code { font: 12px ui-monospace, monospace }
.faint { fill: var(--faint) }
.title { font-weight: bold }
.grid { stroke: var(--line) }
.way { fill: none; stroke: var(--way); stroke-width: 2 }
.band { fill: var(--band) }
.each { fill: var(--way) }
.once { fill: var(--band); stroke: var(--way); stroke-width: 2 }
"""


class Step(NamedTuple):
    """A function on a way, the names that it must use, and what it does."""

    file: str
    function: str
    uses: tuple[str, ...]
    what: str
    once: bool  # by the first call of a key only

    @property
    def package(self) -> str:
        """The package that holds it."""
        return self.file.partition("/")[0]


TRAINING = """
  hooks/gpytorch.py: _training | _step _dispatch_step | takes the call of GPyTorch's method
  density/array_density.py: step_of | _steps Step | reads the model once; later checks that its parts are the same
  runtime/dispatch.py: route | key_of memo entry run | looks up the key of the call; a known one runs at once
> runtime/session.py: Session.entry | problem_of Feasibility decision made | decides a new key
> ops/exact_models.py: _Objective.problem_of | Problem | describes it: points, dimensions, dtype, device, kernels
> core/problem.py: Feasibility | why_not memory | finds the candidates that can serve, and their bytes
> tuning/policy.py: decide | _Case choice | takes orders first, then predicted times, else stock
> tuning/chooser.py: Chooser.estimates | forests shipped | predicts times over stock's by regression trees
> runtime/memo.py: Entry.serve | candidate run | keeps the function of the candidate for this key
  ops/exact_models.py: objective_by_arrays | one_thread loss | is the candidate for a small model
  system/threads.py: _OneThread.__enter__ | put | limits OpenBLAS to one thread meanwhile
  density/array_density.py: evaluated | fetched computed | hands points, mean and targets over as arrays
  density/exact_objective.py: Single._density_of | _density backward | forms the covariance, then all derivatives
  density/matrices.py: density | _solution _inverse | factorises, solves and inverts by LAPACK
  core/autograd.py: computed | _Computed | returns the loss as one node with its gradients
  core/autograd.py: _pulled_back | times | scales the gradients when `loss.backward()` asks
"""
PREDICTION = """
  hooks/prediction.py: _get_test_prior_mean_and_covariances | ours _new_and_cross | leaves covariances unformed
  hooks/strategies.py: ours | serves adopt | checks by value that the model has not changed
  hooks/prediction.py: _exact_prediction | Query _dispatch_predict | describes the call as one `Query`
  runtime/dispatch.py: route | key_of memo entry run | looks up the key; a new one is decided as above
  ops/predict.py: lazy | _factor evaluated deferred | is the candidate `lazy`: a mean now, a covariance later
  prediction/factor_cache.py: of | found _made | finds the model's factor, or factorises once
  prediction/lazy_covariance.py: evaluated | kernel forward | asks the kernel for test by training points
  hooks/kernels.py: _hooked | _dispatch | takes that call too: it is the op `kernel_matrix`
  ops/kernel_matrix.py: gemm | both matrix | is a candidate of that op
  kernels/tree.py: read | Tree | reads the kernel as a tree whose leaves are scaled points
  kernels/matrix.py: matrix | apart _Matrix | forms the matrix by one GEMM, the rest in place
  prediction/inverse_factor.py: Conditioned.mean | alpha | multiplies by the solution of the training data
  prediction/lazy_covariance.py: PosteriorCovariance._diagonal | by_blocks | runs when `.variance` is read
"""
"""A function, the names that it uses, what it does; > marks what only the first call of a key does."""


def steps(lines: str) -> tuple[Step, ...]:
    """Return the steps of such a text."""
    found = []
    for line in lines.strip("\n").splitlines():
        place, uses, what = (cell.strip() for cell in line[2:].split("|"))
        file, _, function = place.partition(": ")
        found.append(Step(file, function, tuple(uses.split()), what, line.startswith(">")))
    return tuple(found)


WAYS = {
    "A training step: `loss = -mll(model(x), y)`, `loss.backward()`": steps(TRAINING),
    "A prediction: `model.eval()`, `model(x).mean`, `.variance`": steps(PREDICTION),
}


def packages() -> list[str]:
    """Return the packages from the highest to the lowest, as the import contract has them."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r"^layers = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    names = re.findall(r"[\w.]+", found[1])
    return [name for name in names if (ROOT / "autokern" / name).is_dir()]


@functools.cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / "autokern" / file).read_text(encoding="utf-8"))


def source(step: Step) -> ast.AST | None:
    """Return the function or class of a step, None if there is no such one."""
    node: ast.AST | None = parsed(step.file) if (ROOT / "autokern" / step.file).is_file() else None
    kinds = ast.FunctionDef, ast.ClassDef
    for name in step.function.split("."):
        below: Sequence[ast.AST] = getattr(node, "body", ())
        node = next((each for each in below if isinstance(each, kinds) and each.name == name), None)
    return node


def names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a function uses."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


def faults() -> list[str]:
    """Return where the ways are not those of the code, or do not fit the picture."""
    found = []
    for step in (step for way in WAYS.values() for step in way):
        node, place = source(step), f"{step.file}: {step.function}"
        if step.package not in packages():
            found.append(f"{step.package} is not in the import contract")
        if node is None:
            found.append(f"{place} does not exist")
        elif missing := set(step.uses) - set(names(node)):
            found.append(f"{place} does not use {', '.join(sorted(missing))}")
        found += [f"{said!r} is longer than {LONGEST} characters" for said in (place, step.what) if len(said) > LONGEST]
    return found


def text(x: float, y: float, content: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{more}>{html.escape(content.replace("`", ""), quote=False)}</text>'


def drawn(title: str, way: Sequence[Step], top: float) -> Iterator[str]:
    """Yield the elements of one way, whose first pixel is at `top`."""
    at = {name: LEFT + COLUMN * i for i, name in enumerate(packages())}
    first, last = top + HEAD + ROW, top + HEAD + ROW * len(way)
    once = [i for i, step in enumerate(way) if step.once]
    yield text(LEFT, top + 20, title, ' class="title"')
    if once:
        y, height = first + ROW * (once[0] - 0.5), ROW * len(once)
        yield f'<rect class="band" x="0" y="{y:g}" width="{WIDTH}" height="{height}"/>'
        yield text(WIDTH - 8, y + 16, "once for each key", ' class="faint" text-anchor="end"')
    for name, x in at.items():
        yield f'<path class="grid" d="M{x} {top + HEAD:g}V{last + 12:g}"/>'
        used = "" if any(step.package == name for step in way) else ' class="faint"'
        yield text(0, 0, name, f' transform="translate({x + 4} {top + HEAD - 6:g}) rotate(-50)"{used}')
    points = [(at[step.package], first + ROW * i) for i, step in enumerate(way)]
    yield f'<path class="way" d="M{"L".join(f"{x} {y:g}" for x, y in points)}"/>'
    for (x, y), step in zip(points, way, strict=True):
        yield f'<circle class="{"once" if step.once else "each"}" cx="{x}" cy="{y:g}" r="6"/>'
        yield text(TEXT, y - 2, f"{step.file}: {step.function}", ' class="code"')
        yield text(TEXT, y + 15, step.what, ' class="faint"')


def svg() -> str:
    """Return the picture."""
    parts, top = list[str](), 0.0
    for title, way in WAYS.items():
        parts += drawn(title, way, top)
        top += HEAD + ROW * (len(way) + 1)
    size = f'viewBox="0 0 {WIDTH} {top:g}" width="{WIDTH}" height="{top:g}"'
    label = "One training step and one prediction through the packages of autokern"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


def tables() -> str:
    """Return the ways as Markdown."""
    lines = []
    for title, way in WAYS.items():
        lines += [f"**{title}**", "", "| | function | what it does |", "|---:|---|---|"]
        lines += [
            f"| {number}{' ○' * step.once} | `{step.file}: {step.function}` | {step.what} |"
            for number, step in enumerate(way, start=1)
        ]
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write picture and tables, or with ``--check`` tell by the exit status whether they are those of the code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if anything is out of date")
    options = parser.parse_args(arguments)
    wrong = faults()
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    same = documents.refresh(DOCUMENT, BLOCK, tables(), options.check)
    if options.check:
        same = same and PICTURE.is_file() and PICTURE.read_text(encoding="utf-8") == svg()
    else:
        PICTURE.write_text(svg(), encoding="utf-8")
    return int(bool(wrong) or (options.check and not same))


if __name__ == "__main__":
    sys.exit(main())
