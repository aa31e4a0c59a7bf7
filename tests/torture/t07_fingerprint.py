"""T7: the same machine finds its profile in every process, whoever starts it and wherever; any other misses it."""

from __future__ import annotations

import concurrent.futures
import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import Findings, Mutation, main

from autokern.core.settings import Settings
from autokern.system import host
from autokern.tuning import store
from autokern.tuning.profile import Profile

CODE = """
from autokern.system import host
from autokern.tuning import store
from autokern.core.settings import from_environment
found = host.current().fingerprint
print(found, store.load(from_environment(), found) is not None)
"""


class Size(NamedTuple):
    """How much is done: fresh processes."""

    processes: int


SIZES = {"ci": Size(12), "full": Size(1000)}


def fresh(found: Findings, size: Size) -> None:
    """Ask fresh processes in various surroundings."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "home")
        here = host.current()
        store.save(Settings(home=home), Profile(host=here.fields, fingerprint=here.fingerprint))
        surroundings = [
            {}, {"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"}, {"LANG": "tr_TR.UTF-8", "LC_ALL": "C"},
            {"HOME": folder}, {"TZ": "Asia/Kathmandu"}, {"PYTHONOPTIMIZE": "2"}, {"COLUMNS": "20", "TERM": "dumb"},
            {"XDG_CACHE_HOME": folder}, {"PYTHONDONTWRITEBYTECODE": "1"},
        ]  # fmt: skip

        def ask(number: int) -> str:
            environment = {**os.environ, "AUTOKERN_HOME": str(home), **surroundings[number % len(surroundings)]}
            done = subprocess.run(
                [sys.executable, "-c", CODE], env=environment, cwd=[folder, "/"][number % 2], check=False,
                capture_output=True, text=True,
            )  # fmt: skip
            return done.stdout.strip() or f"nothing: {done.stderr.strip()[-200:]}"

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            answers = list(pool.map(ask, range(size.processes)))
        misses = [answer for answer in answers if answer != f"{here.fingerprint} True"]
        found.expect(not misses, f"{len(misses)} of {len(answers)} processes missed: {misses[:2]}")
        found.figures["fresh"] = f"{len(answers) - len(misses)} of {len(answers)} processes hit"


def flipped(found: Findings, size: Size) -> None:
    """Change each field of the host in turn: its profile must not be found."""
    with tempfile.TemporaryDirectory() as folder:
        settings, here = Settings(home=Path(folder, "home")), host.current()
        store.save(settings, Profile(host=here.fields, fingerprint=here.fingerprint))
        fields = {key: value for key, value in here.fields.items() if key != "remarks"}
        fields["accelerators"] = fields["accelerators"] or [{"name": "made up", "memory_gib": 80, "capability": "9.0"}]
        whole = host.fingerprint_of(fields)
        seen = {whole}
        count = 0
        for path in _paths(fields):
            for change in (lambda v: f"{v}x", lambda v: None, lambda v: v + 1 if isinstance(v, (int, float)) else [v]):
                changed = copy.deepcopy(fields)
                node: Any = changed
                for key in path[:-1]:
                    node = node[key]
                node[path[-1]] = change(node[path[-1]])
                if changed == fields:
                    continue
                print_ = host.fingerprint_of(changed)
                count += 1
                found.expect(print_ != whole, f"{'.'.join(map(str, path))} is not part of the fingerprint")
                found.expect(store.load(settings, print_) is None, f"another host's profile was loaded: {path}")
                seen.add(print_)
        remarked = {**here.fields, "remarks": {"anything": 1}}
        found.expect(host.fingerprint_of(remarked) == here.fingerprint, "remarks are part of the fingerprint")
        before = torch.get_num_threads()
        torch.set_num_threads(before + 1)
        other = host.current().fingerprint
        torch.set_num_threads(before)
        found.expect(other != here.fingerprint, "the number of threads is not part of the fingerprint")
        found.expect(count > 20, f"only {count} fields were changed")
        found.figures["flipped"] = f"{count} changes, {len(seen) - 1} fingerprints"


def _paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _paths(value, (*path, key))
    elif isinstance(node, list) and node:
        for index, value in enumerate(node):
            yield from _paths(value, (*path, index))
    else:
        yield path


MUTATIONS = [
    Mutation(
        "the fingerprint depends on the process",
        "system/host.py",
        "    text = json.dumps(telling,",
        "    text = str(hash(str(telling))) + json.dumps(telling,",
        "fresh",
    ),
    Mutation(
        "versions of libraries do not count",
        "system/host.py",
        'if key != "remarks"}',
        'if key not in ("remarks", "versions")}',
        "flipped",
    ),
]

if __name__ == "__main__":
    main({"fresh": fresh, "flipped": flipped}, SIZES)
