"""Doctor: checks of this machine and of the installation, with advice where one fails."""

from __future__ import annotations

import importlib.util
import os
import stat
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gpytorch
import msgspec
import numpy
import torch

from autokern.cli.tables import Table, counted
from autokern.core.errors import AutokernError, ProfileError
from autokern.core.registry import Plugin, plugins, registered
from autokern.core.releases import known
from autokern.core.releases.recorded import table
from autokern.core.settings import ROWS, Settings, from_environment, is_ours
from autokern.hooks import install
from autokern.hooks.later import acquisition
from autokern.runtime import dispatch
from autokern.system import host
from autokern.system.load import cpu_quota, look
from autokern.tuning import store
from autokern.tuning.profile import Trial

_REPORT = "please report this with the output of `autokern doctor --json`"
_MARKS = {"ok": "✓", "note": "•", "problem": "✗"}


class Finding(msgspec.Struct, frozen=True):
    """Result of one check."""

    name: str
    status: str  # "ok", "note" (costs speed at most) or "problem"
    found: str  # the result, in words
    advice: str = ""  # the remedy; empty if everything works


def examine() -> list[Finding]:
    """Run all checks, in a few seconds."""
    load = look()  # before autokern itself keeps cores busy
    advice = "measurements made now count as disturbed; measure when other programs have left the cores"
    busy = _seen("load", str(load), advice if load.crowded() else "")
    environment, settings = _environment(os.environ)
    found = [_versions(), environment, *_cache(settings), _threads(settings), busy, _blas(), _gpu(), _tf32()]
    if environment.status != "problem" and settings.enabled:
        found.append(_hooks())
    return [*found, *_optimiser(), *map(_of_plugin, plugins())]


def tabular(found: Sequence[Finding]) -> Table:
    """Return a table of findings with their advice; the title counts problems and notes."""
    rows = [(_MARKS[row.status], row.name, row.found + (f"\n→ {row.advice}" if row.advice else "")) for row in found]
    counts = (counted(sum(row.status == status for row in found), status) for status in ("problem", "note"))
    return Table(", ".join([f"{len(found)} checks", *counts]), ("", "check", "found"), rows)


def _seen(name: str, found: str, advice: str = "", status: str = "note") -> Finding:
    return Finding(name, status if advice else "ok", found, advice)


def _versions() -> Finding:
    found = host.current().fields
    install.status()  # finds hooks that cannot be installed
    unknown = known.everything()
    libraries = known.versions()
    versions = {"python": "", **{library: version for library, (version, _) in libraries.items()}}
    named = [f"{name} {found['versions'].get(name) or version}" for name, version in versions.items()]
    text = f"autokern {found['remarks']['autokern']}, {', '.join(named)}"
    untested = [library for library, (_, tested) in libraries.items() if not tested]
    if unknown:
        listed = "; ".join(f"{name} {why}" for name, why in sorted(unknown.items()))
        tested = "; ".join(f"{library}: {', '.join(table()['releases'][library])}" for library in untested)
        text += f"; tested are {tested}" if tested else ""
        remedy = "install tested releases" if untested else "take out what replaces them"
        advice = f"{remedy}, or set AUTOKERN_UNKNOWN=trust; until then stock runs where autokern relies on these"
        return Finding("versions", "problem" if untested else "note", f"{text}; {listed}", advice)
    if untested:
        text += f"; {', '.join(untested)} not tested, but all functions that autokern relies on are known"
    return Finding("versions", "note" if untested else "ok", text)


def _environment(environ: Mapping[str, str]) -> tuple[Finding, Settings]:
    """Return a finding on the environment variables, and the valid settings."""
    ours = {name: environ[name] for name in sorted(environ) if is_ours(name)}
    try:
        settings = from_environment(environ)
    except AutokernError as error:
        usable = {name: ours[name] for name in ("AUTOKERN_HOME",) if name in ours}
        advice = "correct or unset it: until then autokern refuses to be enabled"
        return Finding("environment", "problem", str(error), advice), from_environment(usable)
    if not settings.enabled:
        return Finding("environment", "note", "AUTOKERN=0: stock code everywhere", "unset it to use autokern"), settings
    text = ", ".join(f"{name}={value}" for name, value in ours.items() if name in {row.variable for row in ROWS})
    if host.multi_rank():
        advice = "measure beforehand with `autokern calibrate`; all ranks then share the profile"
        return Finding("environment", "note", "one of several ranks: nothing is measured here", advice), settings
    return Finding("environment", "ok", text or "no AUTOKERN_* variable is set"), settings


def folder_obstacle(settings: Settings) -> str | None:
    """Return why measurements cannot be stored, or None; creates the folder, writes a file and removes it."""
    try:
        with store.opened_home(settings, create=True) as folder:
            folder.write("0" * 8, None)
    except (OSError, ProfileError) as error:
        return str(error)
    return None


def _cache(settings: Settings) -> list[Finding]:
    where, obstacle = store.home(settings), folder_obstacle(settings)
    if where is None or obstacle is not None:
        advice = "set AUTOKERN_HOME to a private folder that can be written; until then every process measures anew"
        return [Finding("cache folder", "problem", f"{where or 'none'}: {obstacle}", advice)]
    mode = stat.S_IMODE(where.stat().st_mode)
    return [Finding("cache folder", "ok", f"{where} can be written, mode {mode:04o}"), _profile(settings)]


def _profile(settings: Settings) -> Finding:
    fingerprint, pinned = host.current().fingerprint, settings.profile
    again = "`autokern calibrate` measures again"
    try:
        kept = store.in_force(msgspec.structs.replace(settings, strict=True), fingerprint)
    except ProfileError as error:
        return Finding("profile", "problem", str(error), "mend AUTOKERN_PROFILE" if pinned else again)
    if kept is None or not kept.trials:
        if pinned is not None:
            return Finding("profile", "note", f"{pinned} holds no measurements", "unset AUTOKERN_PROFILE")
        text = "nothing was measured on this machine as it is now"
        return Finding("profile", "note", text, "`autokern calibrate` takes 20 s; else long programs measure")
    disturbed = sum(trial.disturbed for trial in kept.trials)
    text = f"{len(kept.trials)} problems of {len({trial.problem.op for trial in kept.trials})} ops"
    text += (f", {disturbed} disturbed" if disturbed else "") + f", last measured {kept.created[:10]}"
    if pinned is not None:
        text += f", {store.origin(settings, fingerprint)}".replace("\n", " ")
    if is_disturbed(kept.trials):
        return Finding("profile", "note", text, f"{again} these on a quiet machine")
    return Finding("profile", "ok", text)


def is_disturbed(trials: Sequence[Trial]) -> bool:
    """Whether other programs disturbed more than a third of the trials."""
    return 3 * sum(trial.disturbed for trial in trials) > len(trials)


def _threads(settings: Settings) -> Finding:
    quota, cpus, ceiling, used = cpu_quota(), host.affinity(), host.thread_ceiling(), torch.get_num_threads()
    text = f"torch uses {used}; affinity allows {cpus}, CPU quota {'none' if quota is None else f'{quota:g}'}"
    if used > ceiling and settings.threads == "auto":
        return Finding("threads", "note", text, f"autokern lowers it to {ceiling} while it is enabled")
    if used > ceiling:
        return Finding("threads", "problem", text, f"too many threads wait for each other: OMP_NUM_THREADS={ceiling}")
    idle = used < ceiling and not os.environ.get("OMP_NUM_THREADS")
    physical = f"that leaves {ceiling - used} CPUs idle, which is right if they are hyper-threads"
    return _seen("threads", text, f"{physical}; else OMP_NUM_THREADS={ceiling}" if idle else "")


def _blas() -> Finding:
    versions = host.current().fields["versions"]
    own = ", ".join(f"{name} {versions[name]}" for name in ("mkl", "openblas") if name in versions)
    numpys = numpy.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    name = f"{numpys.get('name', 'unknown')} {numpys.get('version', '')}".strip()
    return _seen("BLAS", f"torch: {own or versions.get('blas', 'unknown')}; numpy: {name}")


def _gpu() -> Finding:
    if gpus := host.current().fields["accelerators"]:
        names = ", ".join(f"{g['name']} ({g['memory_mib'] / 1024:.0f} GiB)" for g in gpus if "memory_mib" in g)
        return _seen("GPU", names or gpus[0].get("name", "found"))
    if Path("/proc/driver/nvidia/version").exists():
        text = f"an NVIDIA driver is here, but torch {torch.__version__} finds no device"
        return Finding("GPU", "problem", text, "install a torch that is built for CUDA, or check CUDA_VISIBLE_DEVICES")
    return _seen("GPU", "none; everything runs on the CPU")


def _tf32() -> Finding:
    settings: dict[str, Any] = {"CUDA devices": torch.backends.cuda, "the CPU": torch.backends.mkldnn}
    precisions = {where: library.matmul.fp32_precision for where, library in settings.items()}
    low = [f"{precision} on {where}" for where, precision in precisions.items() if precision not in ("none", "ieee")]
    text = f"float32 products run in {', '.join(low)}, where that is supported"
    advice = "a GP loses digits that it needs: torch.set_float32_matmul_precision('highest')"
    return _seen("TF32", text, advice, "problem") if low else _seen("TF32", "off: float32 products are float32")


def _hooks() -> Finding:
    """Compare a small model with and without the hooks, on each device."""
    began = time.perf_counter()
    try:
        differ = [device for device in host.current().devices if not _agrees(torch.device(device))]
    except Exception as error:
        return Finding("hooks", "problem", f"{type(error).__name__}: {error}".splitlines()[0], _REPORT)
    served = sum(count for by in dispatch.stats().values() for count in by.values())
    text = f"a small model agrees with stock; {counted(served, 'call')} served"
    text = f"a small model differs from stock on {', '.join(differ)}" if differ else text
    works = not differ and (served or known.unknown())
    return _seen("hooks", f"{text} ({time.perf_counter() - began:.1f} s)", "" if works else _REPORT, "problem")


def _agrees(device: torch.device) -> bool:
    dtype = torch.float32 if device.type == "mps" else torch.float64
    x = torch.linspace(0, 1, 40, dtype=dtype, device=device).unsqueeze(-1)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5)).to(x)

    def value() -> float:
        k = kernel(x).add_jitter(0.1)
        return float(k.inv_quad_logdet(x, logdet=True)[1].item() + k.to_dense().sum().item())

    install.disable()  # `autokern everywhere` may have enabled it
    stock = value()
    with install.enabled():
        return abs(value() - stock) < (1e-6 if dtype is torch.float64 else 1e-3) * abs(stock)


def _optimiser() -> list[Finding]:
    """Warn of a SciPy release with which BoTorch silently leaves its batched optimiser."""
    if importlib.util.find_spec("botorch") is None or acquisition.scipy_release() < acquisition.TRIED:
        return []  # before importing BoTorch, which takes 2 s
    from botorch.generation import gen

    if not acquisition.leaves_batch(gen):
        return []
    obstacle, release = acquisition.obstacle(), ".".join(map(str, acquisition.scipy_release()))
    text = f"BoTorch leaves its batched L-BFGS-B with SciPy {release}; {obstacle or 'autokern puts it back'}"
    advice = "acquisitions take two to four times as long: `pip install 'scipy<1.18'`, or a later BoTorch"
    return [_seen("BoTorch's optimiser", text, advice if obstacle else "")]


def _of_plugin(plugin: Plugin) -> Finding:
    """Report whether a plugin is loaded, its candidates, and why these cannot serve."""
    name = f"plugin {plugin.source}"
    if plugin.failure:
        advice = "update or remove its package; until then its candidates are left out, all else works"
        return Finding(name, "problem", f"could not be loaded: {plugin.failure}", advice)
    own = [(op, candidate) for op in registered() for candidate in op.candidates if candidate.source == plugin.source]
    if not own:
        return Finding(name, "note", "adds no candidate", "ask its author")
    words = ", ".join(f"{op.name}.{candidate.name}" for op, candidate in own)
    there, obstacle = "", None
    for device in host.current().devices:  # the accelerator last, if there is one
        grids = {op: [p for dtype in ("float64", "float32") for p in op.grid("quick", dtype, device)] for op, _ in own}
        reasons = Counter(candidate.why_not(problem) for op, candidate in own for problem in grids[op])
        obstacle = None if None in reasons or not reasons else reasons.most_common(1)[0][0]
        there = there or (f"available on {device} only; " if obstacle is None else "")
    if obstacle is None:
        return Finding(name, "ok", f"{words}: available")
    return Finding(name, "note", f"{words}: {there}{obstacle}", "optional; left out until then")
