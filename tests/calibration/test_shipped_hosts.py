"""The hosts that the package ships are what `calibration/ship.py` makes of the recorded ones."""

from __future__ import annotations

import struct

import msgspec
import pytest
import ship

from autokern.tuning.chooser import Shipped, unpacked
from autokern.tuning.forest import UNKNOWN
from autokern.tuning.profile import Profile


def test_the_package_ships_what_the_recorded_hosts_measured(monkeypatch):
    assert ship.main(["--check"]) == 0
    monkeypatch.setattr(ship, "LARGEST", ship.FILE.stat().st_size // 2)  # last digits change what compresses well
    assert ship.main(["--check"]) == 1


@pytest.fixture(scope="module")
def shipped() -> Shipped:
    return msgspec.msgpack.decode(ship.FILE.read_bytes(), type=Shipped)


def test_the_file_says_below_which_sizes_stock_serves(shipped):
    assert all(shipped.forests[f"{op}@cpu"].floor > 1000 for op in ("cholesky", "qr"))


def test_the_check_of_the_file_sees_other_hosts_and_other_trials(shipped):
    assert ship.same(shipped, msgspec.msgpack.decode(ship.FILE.read_bytes(), type=Shipped))
    assert not ship.same(msgspec.structs.replace(shipped, hosts=shipped.hosts[1:]), shipped)
    less = msgspec.msgpack.decode(ship.pack([Profile(trials=unpacked(shipped.trials["qr@cpu"])[1:])]), type=Shipped)
    changed = shipped.trials | {"qr@cpu": less.trials["qr@cpu"]}
    assert not ship.same(shipped, msgspec.structs.replace(shipped, trials=changed))


def test_the_check_of_the_file_sees_other_trees(shipped):
    def with_tree(forest):
        return msgspec.structs.replace(shipped, forests=shipped.forests | {"qr@cpu": forest})

    forest = shipped.forests["qr@cpu"]
    numbers = struct.unpack(f"<{len(forest.base.values) // 2}h", forest.base.values)
    slower = struct.pack(f"<{len(numbers)}h", *(n if n == UNKNOWN else n + 50 for n in numbers))
    assert not ship.same(
        shipped, with_tree(msgspec.structs.replace(forest, base=msgspec.structs.replace(forest.base, values=slower)))
    )
    left = {key: forest for key, forest in shipped.forests.items() if key != "qr@cpu"}
    assert not ship.same(shipped, msgspec.structs.replace(shipped, forests=left))
