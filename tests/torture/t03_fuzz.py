"""T3: any bytes in place of a profile give a valid profile or none, and the next publish repairs them.

Bytes are flipped, cut, repeated and exchanged; and, since most of that is no JSON, values are changed within it: NaN,
negative and huge times, wrong types, names that nobody registered, deep nesting.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bare import HOST, at, leftovers, profile, saved, sizes, store
from harness import Findings, Mutation, main

from autokern.tuning.profile import SCHEMA, Profile


class Size(NamedTuple):
    """How much is done: mutated files of each kind."""

    damaged: int
    forged: int


SIZES = {"ci": Size(600, 600), "full": Size(6000, 6000)}
GOOD = profile(8, 16)
_SLOW = 1.0
"""Seconds in which any file must have been judged."""


def _damaged(data: bytes, draw: random.Random) -> bytes:
    """Return the file with something done to its bytes."""
    at_byte = draw.randrange(len(data))
    kinds: list[Callable[[], bytes]] = [
        lambda: data[:at_byte],
        lambda: data[at_byte:],
        lambda: data[:at_byte] + bytes([data[at_byte] ^ 1 << draw.randrange(8)]) + data[at_byte + 1 :],
        lambda: data[:at_byte] + draw.randbytes(draw.randrange(1, 50)) + data[at_byte:],
        lambda: data + data,
        lambda: data + b"\0" * draw.randrange(1, 5000),
        lambda: draw.randbytes(draw.randrange(2000)),
        lambda: data.replace(b":", b": ", 3),
        lambda: b"\xef\xbb\xbf" + data,
    ]
    return draw.choice(kinds)()


_ODD: list[Any] = [
    math.nan, math.inf, -math.inf, -1.0, 0, 0.0, -0.0, 1e308, 10**400, 1e-320, True, None, "", "x" * 10_000, "../..",
    "\ud800", [], {}, [[]], {"a": {}}, -(2**63), 2**64, "__import__('os').abort()",
]  # fmt: skip


def _forged(body: dict[str, Any], draw: random.Random) -> Any:
    """Return the profile with some values exchanged, named otherwise or left out."""
    for _ in range(draw.randrange(1, 4)):
        places: list[tuple[Any, Any]] = []

        def collect(node: Any, places: list[tuple[Any, Any]] = places) -> None:
            for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
                places.append((node, key))
                collect(node[key])

        collect(body)
        if not places:
            return body
        node, key = draw.choice(places)
        kind = draw.randrange(4)
        if kind == 0 and isinstance(node, dict):
            node[draw.choice(["", "rm -rf", "stock", "cpu", "\0", str(key) * 2])] = node.pop(key)
        elif kind == 1:
            del node[key]
        else:
            node[key] = json.loads(json.dumps(draw.choice(_ODD)))
    return body


def _judged(found: Findings, home: Path, what: str, may: Callable[[Profile], bool]) -> None:
    """Load what lies in a home, judge it, and repair it."""
    start = time.perf_counter()
    try:
        loaded = store.load(at(home), HOST)
    except Exception as error:
        found.broken.append(f"{what}: loading raised {error!r}"[:300])
        return
    seconds = time.perf_counter() - start
    found.expect(seconds < _SLOW, f"{what}: judged after {seconds:.1f} s")
    found.expect(loaded is None or may(loaded), f"{what}: silently accepted"[:300])
    kept = sizes(loaded)
    written = saved(home, profile(64))
    after = sizes(store.load(at(home), HOST))
    found.expect(written is not None and after == kept | {64}, f"{what}: not repaired, {sorted(after)} is kept"[:300])
    found.figures["slowest"] = max(seconds, found.figures.get("slowest", 0.0))


def _sane(loaded: Profile) -> bool:
    """Whether a profile is of the host, and all its numbers are possible."""
    timings = [timing for trial in loaded.trials for timing in trial.timings.values()]
    numbers = [x for t in timings for x in (t.seconds, t.ratio, t.noise)] + list(loaded.setup.values())
    return loaded.fingerprint == HOST and all(0 <= x < math.inf for x in numbers)


def damaged(found: Findings, size: Size) -> None:
    """Put damaged files in the place of a profile: none, or a valid one where a number or a name has changed."""
    with tempfile.TemporaryDirectory() as folder:
        home, draw = Path(folder, "home"), random.Random(3)
        path = saved(home, GOOD)
        assert path is not None
        whole = path.read_bytes()
        accepted = 0
        for index in range(size.damaged):
            data = _damaged(whole, draw)
            path.write_bytes(data)
            _judged(found, home, f"damaged file {index}", _sane)
            accepted += data == whole
            _empty(home)
        found.figures["damaged"] = f"{size.damaged} files, {accepted} of them whole"


def forged(found: Findings, size: Size) -> None:
    """Put JSON of other contents in the place of a profile: valid ones count, no others."""
    with tempfile.TemporaryDirectory() as folder:
        home, draw = Path(folder, "home"), random.Random(4)
        path = saved(home, GOOD)
        assert path is not None
        body = path.read_bytes()
        valid = 0

        def sane(loaded: Profile) -> bool:
            nonlocal valid
            valid += 1
            return _sane(loaded)

        for index in range(size.forged):
            text = json.dumps(_forged(json.loads(body), draw))
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
            _judged(found, home, f"forged file {index}: {text[:160]}", sane)
            _empty(home)
        found.figures["forged"] = f"{size.forged} files, {valid} of them valid"


def monsters(found: Findings, size: Size) -> None:
    """Put what is no file of reasonable size in the place of a profile."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "home")
        path = saved(home, GOOD)
        assert path is not None
        whole = path.read_bytes()
        deep = b"[" * 10**6 + b"]" * 10**6

        def sparse() -> None:
            with path.open("wb") as file:
                file.truncate(2**30)

        def tree() -> None:
            path.mkdir()
            (path / "inside").write_bytes(whole)

        makers: dict[str, Callable[[], object]] = {
            "a million brackets": lambda: path.write_bytes(deep),
            "a million brackets in a profile": lambda: path.write_bytes(whole[:-1] + b',"exam":' + deep + b"}"),
            "a GiB of nothing": sparse,
            "a FIFO": lambda: os.mkfifo(path),
            "a folder": tree,
            "a link to itself": lambda: path.symlink_to(path),
            "a link to a device": lambda: path.symlink_to("/dev/zero"),
            "a socket's name": lambda: _bind(path),
            "an empty file": lambda: path.write_bytes(b""),
        }
        for name, make in makers.items():
            _empty(home)
            make()
            done = threading.Thread(target=_judged, args=(found, home, name, lambda loaded: False), daemon=True)
            done.start()
            done.join(10)
            found.expect(not done.is_alive(), f"{name}: hangs")
        _empty(home)
        newer = b'{"schema":%d,"entirely":"different"}' % (SCHEMA + 7)
        path.write_bytes(newer)
        found.expect(store.load(at(home), HOST) is None, "a newer schema was read")
        saved(home, profile(64))
        found.expect(path.read_bytes() == newer, "a newer autokern's profile was touched")
        found.figures["monsters"] = f"{len(makers)} kinds, and a newer schema"


def _bind(path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as here:
        here.bind(str(path))


def _empty(home: Path) -> None:
    for path in home.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    assert not leftovers(home, "")


MUTATIONS = [
    Mutation(
        "the host is not compared",
        "tuning/store.py",
        "if profile.fingerprint != fingerprint:",
        "if False:",
        "forged",
    ),
    Mutation(
        "the other end of a pipe is waited for",
        "system/files.py",
        'getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) |',
        'getattr(os, "O_CLOEXEC", 0) |',
        "monsters",
    ),
    Mutation(
        "a newer schema is overwritten",
        "tuning/profile.py",
        "if schema > SCHEMA:",
        "if False:",
        "monsters",
    ),
]

if __name__ == "__main__":
    main({"damaged": damaged, "forged": forged, "monsters": monsters}, SIZES)
