"""Write what recorded hosts measured into the package, as the prior of machines that are not measured yet.

`python calibration/ship.py` writes `autokern/tuning/recorded.msgpack` from `hosts/*.json`; with ``--check`` it writes
nothing and exits 1 where the file is not that of the recordings, or larger than it may be.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autokern.cli import summary
from autokern.tuning import recorded
from autokern.tuning.recorded import RecordedHost
from autokern.tuning.store import read_file

HERE = Path(__file__).parent
FILE = HERE.parent / "autokern" / "tuning" / "recorded.msgpack"
LARGEST = 200_000
"""Bytes that the file may have."""


def same(one: Sequence[RecordedHost], other: Sequence[RecordedHost]) -> bool:
    """Whether hosts have the same trials, and the same fits but for the rounding of the machine that made them."""
    if [(h.fields, [*h.pools]) for h in one] != [(h.fields, [*h.pools]) for h in other]:
        return False
    pools = [(a, b, key.split("@")) for a, b in zip(one, other, strict=True) for key in a.pools]
    return all(a.trials(*key) == b.trials(*key) and _fit_alike(a, b, key) for a, b, key in pools)


def _fit_alike(one: RecordedHost, other: RecordedHost, key: Sequence[str]) -> bool:
    fits, others = (host.recording(*key).fits for host in (one, other))
    return [*fits] == [*others] and all(
        np.allclose([*a.coefficients, a.amplitude], [*b.coefficients, b.amplitude], rtol=1e-3, atol=0)
        and np.allclose(*(np.frombuffer(fit.weights, "<f4") for fit in (a, b)), rtol=1e-3, atol=1e-2)
        for a, b in zip(fits.values(), others.values(), strict=True)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    profiles = [summary.present(read_file(path)) for path in sorted((HERE / "hosts").glob("*.json"))]
    data = recorded.pack(profiles)
    if "--check" in given:
        there = FILE.exists() and same(recorded.read(FILE.read_bytes()), recorded.read(data))
        return int(len(data) > LARGEST or not there)
    if len(data) > LARGEST:
        print(f"{len(data)} bytes are more than {LARGEST}: record fewer problems")
        return 1
    FILE.write_bytes(data)
    print(f"{FILE.name}: {len(data)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
