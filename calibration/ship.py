"""Write what recorded hosts measured into the package: the trees that choose on machines that are not measured yet.

`python calibration/ship.py` writes `autokern/tuning/recorded.msgpack` from `hosts/*.json`; with ``--check`` it writes
nothing and exits 1 where the file is not that of the recordings, or larger than it may be. ``--without HOST`` leaves a
host out, to judge the choices on it by what other machines measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from autokern.cli import summary
from autokern.tuning import recorded
from autokern.tuning.recorded import Shipped
from autokern.tuning.store import read_file

HERE = Path(__file__).parent
FILE = HERE.parent / "autokern" / "tuning" / "recorded.msgpack"
LARGEST = 200_000
"""Bytes that the file may have."""
NESTED = ("objective", "posterior")
"""Ops that are not shipped: hosts recorded before ops were measured from the innermost outwards timed their stock while
the ops inside of it still ran stock."""
_ALIKE, _MOST_UNLIKE = 0.02, 0.02
"""Log units by which trees of two machines may differ, and the part of problems on which they may differ by more: where
two splits are equally good, the last digit decides."""


def packed(without: str = "") -> bytes:
    """Return the file of the recorded hosts."""
    paths = [path for path in sorted((HERE / "hosts").glob("*.json")) if path.stem != without]
    profiles = [summary.present(read_file(path)) for path in paths]
    usual = ([t for t in profile.trials if t.problem.op not in NESTED] for profile in profiles)
    return recorded.pack([msgspec.structs.replace(p, trials=trials) for p, trials in zip(profiles, usual, strict=True)])


def same(one: Shipped, other: Shipped) -> bool:
    """Whether two files have the same trials, and trees that say the same of nearly all of them."""
    if [msgspec.structs.astuple(host) for host in one.hosts] != [msgspec.structs.astuple(h) for h in other.hosts]:
        pools = [(a, b, key.split("@")) for a, b in zip(one.hosts, other.hosts, strict=False) for key in a.pools]
        if len(one.hosts) != len(other.hosts) or any(a.trials(*key) != b.trials(*key) for a, b, key in pools):
            return False
    if one.forests.keys() != other.forests.keys():
        return False
    unlike = count = 0
    for key, forest in one.forests.items():
        problems = [t.problem for host in one.hosts for t in host.trials(*key.split("@"))]
        for problem in problems:
            a, b = forest.estimates(problem), other.forests[key].estimates(problem)
            count += 1
            unlike += a.keys() != b.keys() or any(abs(a[n].log_ratio - b[n].log_ratio) > _ALIKE for n in a)
    return unlike <= _MOST_UNLIKE * count


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if the file is out of date")
    parser.add_argument("--without", default="", metavar="HOST", help="leave a host of hosts/ out")
    parser.add_argument("--output", type=Path, default=FILE, help="the file to write")
    options = parser.parse_args(arguments)
    data = packed(options.without)
    if options.check:
        there = FILE.exists() and same(*(msgspec.msgpack.decode(d, type=Shipped) for d in (FILE.read_bytes(), data)))
        return int(len(data) > LARGEST or not there)
    if len(data) > LARGEST:
        print(f"{len(data)} bytes are more than {LARGEST}: record fewer problems")
        return 1
    options.output.write_bytes(data)
    print(f"{options.output.name}: {len(data)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
