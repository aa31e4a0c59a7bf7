"""T5: hostile homes. Wherever the cache should be and cannot, a model trains as ever, with one warning at most."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from harness import Findings, Mutation, main, tmpfs

NOBODY = 54323


class Size(NamedTuple):
    """How much is done: times that each home is tried."""

    times: int


SIZES = {"ci": Size(1), "full": Size(5)}


class Home(NamedTuple):
    """A place for a cache that is none."""

    variables: dict[str, str | None]  # of the environment; None takes one away
    user: int | None = None  # who the process is by then
    locks: bool = True  # whether files can be locked
    kept: bool = False  # whether a profile can be written all the same


@contextmanager
def _homes(folder: Path) -> Iterator[dict[str, Home]]:
    """Places under a folder in which they are made, and taken away again."""
    here = str(folder)
    plain, link, loop, file, closed = (folder / name for name in ("plain", "link", "loop", "file", "closed"))
    plain.mkdir()
    link.symlink_to(plain)
    loop.symlink_to(loop)
    file.write_text("a file")
    closed.mkdir(mode=0o555)
    nothing = {"HOME": None, "XDG_CACHE_HOME": None, "AUTOKERN_HOME": None, "LOGNAME": None, "USER": None}
    found = {
        "no HOME and no passwd entry": Home(nothing, user=NOBODY),
        "HOME is /dev/null": Home({**nothing, "HOME": "/dev/null"}),
        "HOME is empty": Home({**nothing, "HOME": ""}, kept=True),
        "HOME of another user": Home({**nothing, "HOME": here}, user=NOBODY),
        "a folder without write permission": Home({"AUTOKERN_HOME": str(closed)}, user=NOBODY),
        "a file": Home({"AUTOKERN_HOME": str(file)}),
        "below a file": Home({"AUTOKERN_HOME": str(file / "below")}),
        "/dev/null": Home({"AUTOKERN_HOME": "/dev/null"}),
        "/proc": Home({"AUTOKERN_HOME": "/proc/autokern"}),
        "a link of one's own": Home({"AUTOKERN_HOME": str(link / "cache")}, kept=True),
        "a link to itself": Home({"AUTOKERN_HOME": str(loop)}),
        "a name too long": Home({"AUTOKERN_HOME": str(folder / ("x" * 300))}),
        "no flock": Home({"AUTOKERN_HOME": str(folder / "no flock")}, locks=False, kept=True),
    }
    read_only = folder / "read-only"
    read_only.mkdir()
    with tmpfs(read_only, read_only=True) as mounted:
        if mounted:
            found["a read-only file system"] = Home({"AUTOKERN_HOME": str(read_only / "cache")})
        if os.geteuid() != 0:
            found = {name: home for name, home in found.items() if home.user is None}
        folder.chmod(stat.S_IRWXU | 0o055)
        yield found


def homes(found: Findings, size: Size) -> None:
    """Train in a fresh process for each home."""
    slowest = warned = 0.0
    with tempfile.TemporaryDirectory() as folder, _homes(Path(folder)) as places:
        for name, home in places.items():
            for _ in range(size.times):
                told = _in_child(home)
                if "failed" in told:
                    found.broken.append(f"{name}: {told['failed']}")
                    continue
                found.expect(abs(told["loss"] - told["stock"]) < 1e-9, f"{name}: the loss is {told['loss']}")
                found.expect(len(told["warnings"]) <= 1, f"{name}: {len(told['warnings'])} warnings")
                warning = bool(told["warnings"]) != home.kept
                found.expect(warning, f"{name}: told {told['warnings']}, though kept is {home.kept}")
                found.expect(not told["stray"], f"{name}: {told['stray']} was made in the working directory")
                slowest, warned = max(slowest, told["seconds"]), warned + bool(told["warnings"])
        found.expect(slowest < 6, f"a training step with its calibrations took {slowest:.1f} s of a budget of 3")
        found.figures["homes"] = f"{len(places)} homes, {warned:.0f} warnings, slowest {slowest:.1f} s"


def _in_child(home: Home) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as working:
        os.chmod(working, 0o777)
        command = [sys.executable, __file__, "child", json.dumps(home)]
        environment = {**os.environ, "AUTOKERN_BUDGET": "3", "AUTOKERN_CALIBRATE": "first-use"}
        done = subprocess.run(command, env=environment, cwd=working, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"failed": (done.stderr.strip().splitlines() or ["nothing"])[-1]}
        return {**json.loads(done.stdout.splitlines()[-1]), "stray": sorted(os.listdir(working))}


def _train(hooks: Callable[[], Any]) -> float:
    import gpytorch
    import linear_operator
    import torch

    class Model(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self) -> None:
            x = torch.linspace(0, 1, 30, dtype=torch.float64).unsqueeze(-1)
            super().__init__(x, (5 * x[:, 0]).sin(), gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model().double()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    with hooks():
        loss = -objective(model(*model.train_inputs), model.train_targets)
        loss.backward()
        model.eval()
        with torch.no_grad():
            mean = model(torch.linspace(0, 2, 9, dtype=torch.float64).unsqueeze(-1)).mean
            batch = torch.linalg.cholesky(torch.eye(3, dtype=torch.float64).expand(4, 3, 3))
            linear_operator.utils.cholesky.psd_safe_cholesky(batch)
    return float(loss) + float(mean.sum())


def _child(home: Home) -> None:
    """Train once in an ordinary home, so that everything is imported while files can be read; then in this one."""
    import contextlib

    import autokern
    from autokern.core.errors import AutokernWarning
    from autokern.runtime import dispatch, first_use
    from autokern.tuning import store

    first_use.FirstUse._crowded = lambda self: False  # type: ignore[method-assign]  # homes are tried, not loads
    with tempfile.TemporaryDirectory() as ordinary:
        os.environ["AUTOKERN_HOME"] = ordinary
        _train(autokern.enabled)
    stock = _train(contextlib.nullcontext)
    if not home.locks:
        import fcntl

        def no_locks(fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        fcntl.flock = no_locks
    for name, value in home.variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if home.user is not None:
        os.setgroups([])
        os.setgid(home.user)
        os.setuid(home.user)
    store._reported.clear()
    dispatch.reset()
    start, worked = time.perf_counter(), time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AutokernWarning)
        loss = _train(autokern.enabled)
    told = [str(one.message) for one in caught if issubclass(one.category, AutokernWarning)]
    seconds = min(time.perf_counter() - start, time.process_time() - worked)  # others may use the cores
    print(json.dumps({"loss": loss, "stock": stock, "warnings": told, "seconds": seconds}))


MUTATIONS = [
    Mutation(
        "trouble of the cache is raised",
        "tuning/store.py",
        "    if settings.strict:\n        raise ProfileError(message) from error\n    if not _is_known(key):",
        "    if True:\n        raise ProfileError(message) from error\n    if not _is_known(key):",
        "homes",
    ),
    Mutation(
        "every trouble is told again",
        "tuning/store.py",
        "    known = key in _reported\n",
        "    known = False\n",
        "homes",
    ),
]  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1] == "child":
        with suppress(BrokenPipeError):
            _child(Home(*json.loads(sys.argv[2])))
    else:
        main({"homes": homes}, SIZES)
