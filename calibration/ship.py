"""Write what recorded hosts measured into the package: the trees that choose on machines that are not measured yet.

`python calibration/ship.py` writes `autokern/tuning/recorded.msgpack` from `hosts/*.json`; with ``--check`` it writes
nothing and exits 1 where the file is not that of the recordings, or larger than it may be. ``--without HOST`` leaves a
host out, to judge the choices on it by what other machines measured.
"""

from __future__ import annotations

import argparse
import math
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from autokern.cli import summary
from autokern.core.op import Op
from autokern.core.registry import get
from autokern.tuning import forest as fitting
from autokern.tuning.chooser import MANY, UNIT, Shipped, floor, has_many, unpacked
from autokern.tuning.forest import Forest, words
from autokern.tuning.profile import Profile, Trial, pools
from autokern.tuning.store import read_file

HERE = Path(__file__).parent
FILE = HERE.parent / "autokern" / "tuning" / "recorded.msgpack"
LARGEST = 200_000
"""Bytes that the file may have."""
NESTED = ("objective", "posterior")
"""Ops that are not shipped: hosts recorded before ops were measured from the innermost outwards timed their stock while
the ops inside of it still ran stock."""
MOST = 120
"""Trials of an op that are shipped of a host."""
_LEAF = 5
"""Trials in a leaf of a tree, at least."""
_FIELDS = ("system", "cpu", "accelerators", "versions")
_ALIKE, _MOST_UNLIKE = 0.02, 0.02
"""Log units by which trees of two machines may differ, and the part of problems on which they may differ by more: where
two splits are equally good, the last digit decides."""


def packed(without: str = "") -> bytes:
    """Return the file of the recorded hosts."""
    paths = [path for path in sorted((HERE / "hosts").glob("*.json")) if path.stem != without]
    profiles = [summary.present(read_file(path)) for path in paths]
    usual = ([t for t in profile.trials if t.problem.op not in NESTED] for profile in profiles)
    return pack([msgspec.structs.replace(p, trials=trials) for p, trials in zip(profiles, usual, strict=True)])


def pack(profiles: Sequence[Profile]) -> bytes:
    """Return the file of some profiles, without candidates of lower precision."""
    hosts = []
    for profile in profiles:
        usable = pools(t for t in profile.trials if "stock" in t.usual and len(t.usual) > 1)
        suffix = MANY if has_many(profile.host) else ""
        hosts.append({key + suffix * key.endswith("@cpu"): trials for key, trials in usable.items()})
    keys = sorted(set().union(*hosts))
    groups = {key: [host[key] for host in hosts if key in host] for key in keys}
    fits = {key: fit_base(get(key.partition("@")[0]), trials) for key, trials in groups.items()}
    rows = {
        key: [_logs(t) for of in trials for t in of[:: math.ceil(len(of) / MOST)]] for key, trials in groups.items()
    }
    found = Shipped(
        forests={key: _with_floor(key, fit) for key, fit in fits.items() if fit is not None},
        trials={key: zlib.compress(msgspec.msgpack.encode(of), 9) for key, of in rows.items()},
        hosts=[{key: profile.host[key] for key in _FIELDS if key in profile.host} for profile in profiles],
    )
    return msgspec.msgpack.encode(found)


def _with_floor(key: str, forest: Forest) -> Forest:
    op, _, device = key.partition("@")
    return msgspec.structs.replace(forest, floor=floor(get(op), forest, device.partition("/")[0]))


def _logs(trial: Trial) -> tuple[object, dict[str, int]]:
    """Return a problem, and logarithms of stock's seconds and of the ratios of others to them, as whole numbers."""
    logs = {name: math.log(timing.ratio) for name, timing in trial.usual.items()}
    logs["stock"] = math.log(trial.timings["stock"].seconds)
    return trial.problem, {name: round(log / UNIT) for name, log in logs.items()}


def fit_base(op: Op, hosts: Iterable[Sequence[Trial]]) -> Forest | None:
    """Fit the tree of what other hosts measured of an op on one kind of device; None where nothing was."""
    from sklearn.tree import DecisionTreeRegressor

    groups = [fitting.usable(op, (Trial(t.problem, t.usual) for t in trials)) for trials in hosts]
    trials = [trial for group in groups for trial in group]
    if not trials:
        return None
    forest = Forest(fitting.candidates(op, trials), sorted(set().union(*(words(t.problem) for t in trials))))
    places = fitting.places(forest, trials)
    tables = [fitting.table(op, group, forest.candidates) for group in groups]
    filled, known = (np.concatenate([table[k] for table in tables]) for k in (0, 1))
    filled = np.clip(filled, -3.0, 1.2)
    model = DecisionTreeRegressor(min_samples_leaf=_LEAF, random_state=0)
    model.fit(places, np.where(known, filled, 0.0), sample_weight=fitting.weights(trials))
    base = fitting.tree(model.tree_, model.apply(places), np.where(known, filled, np.nan))
    changes = {"base": base, "of_base": len(forest.candidates), "seen": fitting.limits(trials)}
    return msgspec.structs.replace(forest, **changes)


def same(one: Shipped, other: Shipped) -> bool:
    """Whether two files have the same trials, and trees that say the same of nearly all of them."""
    trials, others = ({key: unpacked(data) for key, data in found.trials.items()} for found in (one, other))
    if trials != others or one.hosts != other.hosts or one.forests.keys() != other.forests.keys():
        return False
    unlike = count = 0
    for key, forest in one.forests.items():
        for problem in (trial.problem for trial in trials[key]):
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
