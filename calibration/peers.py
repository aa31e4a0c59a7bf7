"""Run the own test suites of linear_operator and gpytorch with autokern on: no test that passes stock may fail.

The suites are those of the released source distributions of the installed versions. Whatever fails with autokern on
is run again with stock code; what fails there too is not autokern's doing. Nor is what fails stock code as soon as it
sums the coordinates of points in another order (`other_order.py`): such tests ask for more digits than stock has, they
fail on one machine and pass on the next, and each is named when it does. A suite runs in several processes; what a
test draws at random does not depend on which (`each_alone.py`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from pathlib import Path

PACKAGES = ("linear_operator", "gpytorch")

ORDERS = 24
"""How often a test is run again with stock code and coordinates in another order, before its failure is autokern's."""


def unpacked(package: str, workdir: Path) -> Path:
    """Return the root of the unpacked source distribution of the installed version."""
    version = importlib.metadata.version(package)
    root = workdir / f"{package}-{version}"
    if not root.exists():
        asked = [f"{package}=={version}", "--no-deps", "--no-binary", package, "-q", "-d", str(workdir)]
        subprocess.run([sys.executable, "-m", "pip", "download", *asked], check=True)
        with tarfile.open(root.with_name(f"{root.name}.tar.gz")) as archive:
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not in every 3.10 and 3.11
            archive.extractall(workdir, **safely)  # type: ignore[arg-type]
    return root


def run_suite(root: Path, tests: list[str], report: Path, environment: dict[str, str], *options: str) -> None:
    """Run tests in a suite's root folder, with a new report in JUnit's format."""
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "autokern.auto", "-p", "each_alone"]
    command += ["-c", os.devnull, "--rootdir", str(root)]  # whatever project the folder lies in
    command += ["-p", "no:cacheprovider", "--no-header", "--disable-warnings", "--tb=short", f"--junitxml={report}"]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    subprocess.run([*command, *options, *tests], cwd=root, env=variables, check=False)
    if not report.exists():
        raise SystemExit(f"the suite in {root.name} ended without a report")


def outcomes(report: Path) -> tuple[int, set[str]]:
    """Return how many tests passed, and the ids of those that failed."""
    failed, total = set(), 0
    for case in ET.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        total += 1
        if case.find("failure") is not None or case.find("error") is not None:
            module, _, name = (case.get("classname") or "").rpartition(".")
            is_class = name[:1].isupper()
            path = (module if is_class else f"{module}.{name}".strip(".")).replace(".", "/") + ".py"
            failed.add("::".join([path, *([name] if is_class else []), case.get("name") or ""]))
    return total - len(failed), failed


def fails_stock(root: Path, tests: set[str], report: Path) -> set[str]:
    if not tests:
        return set()
    run_suite(root, sorted(tests), report, {"AUTOKERN": "0"})
    return outcomes(report)[1]


def fails_other_orders(root: Path, tests: set[str], report: Path) -> set[str]:
    """Return which tests fail with stock code as soon as it sums coordinates in some other order."""
    found: set[str] = set()
    for seed in range(ORDERS):
        if not tests - found:
            break
        environment = {"AUTOKERN": "0", "OTHER_ORDER": str(seed)}
        run_suite(root, sorted(tests - found), report, environment, "-p", "other_order")
        found |= outcomes(report)[1]
    return found


def judged(package: str, workdir: Path, seed: int | None, only: str = "", jobs: int = 1) -> tuple[int, int]:
    """Run a suite, deciding or drawing at random; print, and return, how many passed and how many fail by autokern."""
    root, report = unpacked(package, workdir), workdir / f"{package}.xml"
    drawn = {} if seed is None else {"AUTOKERN_FORCE": f"random:{seed}"}
    selected = ["-k", only] if only else []
    several = ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []
    waiting = {"OMP_WAIT_POLICY": "passive"} if jobs > 1 else {}  # not fewer threads: profiles are of their number
    run_suite(root, ["test"], report, {"AUTOKERN_CALIBRATE": "never", **drawn, **waiting}, *several, *selected)
    passed, failed = outcomes(report)
    stock = workdir / f"{package}-stock.xml"
    also_stock = fails_stock(root, failed, stock)
    borderline = fails_other_orders(root, failed - also_stock, stock)
    ours = failed - also_stock - borderline
    version = importlib.metadata.version(package)
    print(f"{package} {version}{f', seed {seed}' if drawn else ''}: {passed} passed, {len(failed)} failed, ", end="")
    print(f"{len(also_stock)} of them fail stock too")
    for name in sorted(borderline):
        print(f"  borderline, fails stock too with coordinates in another order: {name}")
    for name in sorted(ours):
        print(f"  fails with autokern only: {name}")
    return passed, len(ours)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=Path, default=Path(".cache/peers"), help="where suites are unpacked")
    parser.add_argument("--random", type=int, nargs="+", metavar="SEED", help="draw candidates at random, by each seed")
    parser.add_argument("--packages", nargs="+", default=PACKAGES, choices=PACKAGES)
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="only the tests that pytest selects by it")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4), help="processes to run a suite in")
    arguments = parser.parse_args()
    workdir = arguments.workdir.resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    seeds = arguments.random or [None]
    only, jobs = arguments.k, arguments.jobs
    found = [judged(package, workdir, seed, only, jobs) for seed in seeds for package in arguments.packages]
    passed, ours = (sum(column) for column in zip(*found, strict=True))
    print(f"{passed} passed, {ours} failed")
    return 1 if ours else 0


if __name__ == "__main__":
    sys.exit(main())
