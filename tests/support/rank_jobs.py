"""Jobs of several ranks, without torchrun, for tests."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT = 240
_FOLDER = Path(__file__).parent
_KEOPS = tempfile.TemporaryDirectory()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def started(program: str, *arguments: object, count: int = 2, **environment: str) -> list[subprocess.Popen[str]]:
    """Start a program of this folder in so many ranks of one thread, or as one process that is no rank."""
    common = {"OMP_NUM_THREADS": "1", "AUTOKERN_CALIBRATE": "never", **environment}
    if count > 1:
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    found = []
    for rank in range(count):
        # KeOps rewrites its list when a process ends, and one that imports it meanwhile reads an empty file
        own = {"RANK": str(rank), "KEOPS_CACHE_FOLDER": tempfile.mkdtemp(dir=_KEOPS.name)}
        command = [sys.executable, str(_FOLDER / f"{program}.py"), *map(str, arguments)]
        pipe, variables = subprocess.PIPE, os.environ | common | own
        found.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, env=variables, text=True))
    return found


def told(process: subprocess.Popen[str]) -> dict[str, object]:
    """Return what a program has printed as JSON in its last line."""
    out, err = process.communicate(timeout=LIMIT)
    assert out.strip(), err
    return json.loads(out.splitlines()[-1])
