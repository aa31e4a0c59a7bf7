"""The hosts that the package ships are what `calibration/ship.py` makes of the recorded ones."""

from __future__ import annotations

import zlib

import msgspec
import ship

from autokern.tuning import recorded
from autokern.tuning.profile import Profile


def test_the_package_ships_what_the_recorded_hosts_measured(monkeypatch):
    assert ship.main(["--check"]) == 0
    monkeypatch.setattr(ship, "LARGEST", ship.FILE.stat().st_size // 2)  # last digits change what compresses well
    assert ship.main(["--check"]) == 1


def test_the_check_of_the_file_sees_other_trials_and_other_fits():
    host = recorded.hosts()[0]
    assert ship.same(recorded.hosts(), recorded.read(ship.FILE.read_bytes()))
    assert not ship.same([host], recorded.hosts())
    changed = recorded.pack([Profile(host=host.fields, trials=host.trials("qr", "cpu")[1:])])
    assert not ship.same(
        [msgspec.structs.replace(host, pools={"qr@cpu": host.pools["qr@cpu"]})], recorded.read(changed)
    )
    pool = host._pool("qr", "cpu")
    fits = {name: msgspec.structs.replace(fit, amplitude=1.01 * fit.amplitude) for name, fit in pool.fits.items()}
    other = zlib.compress(msgspec.msgpack.encode(msgspec.structs.replace(pool, fits=fits)))
    assert not ship.same([host], [msgspec.structs.replace(host, pools=host.pools | {"qr@cpu": other})])
