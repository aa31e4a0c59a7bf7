"""Doctor: checks the parts of this machine, and advises on those that fail.

Parts that may hang, crash or print (compilers, KeOps, drivers) are tried in child processes (`probe`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from autokern.cli.findings import Finding, of_plugins, seen
from autokern.cli.probe import Answer, Probe
from autokern.core.errors import AutokernError, ProfileError
from autokern.core.releases import installed, known
from autokern.core.releases.recorded import table
from autokern.core.settings import ROWS, Settings, from_environment, is_ours
from autokern.hooks import install
from autokern.hooks.later import generation
from autokern.system import cgroups, host, keops
from autokern.system.files import Folder
from autokern.system.load import Load, look
from autokern.system.progress import Progress, silent
from autokern.tuning import store, timer
from autokern.tuning.profile import Trial

_LONGEST = 27.0
"""Seconds after which a probe counts as failed."""
_LITTLE_MEMORY = 2 * 2**30
_REPORT = "please report this with the output of `autokern doctor --json`"
_SLOW_GEMM = 2e9
"""A BLAS with fewer flops a second in a matrix product counts as unoptimised."""


def examine(quick: bool = False, progress: Progress = silent) -> list[Finding]:
    """Run all checks, in less than half a minute."""
    load = _load(look())  # before autokern itself keeps cores busy
    with contextlib.ExitStack() as stack:
        names = ["hooks"] + ([] if host.accelerator() is None else ["GPU"])
        names += [] if quick else ["torch.compile"] + (["KeOps"] if importlib.util.find_spec("pykeops") else [])
        probes = {name: stack.enter_context(Probe(name)) for name in names}
        progress(0.05, "versions, settings, cache folder")
        environment, settings = _environment(os.environ)
        found = [_versions(), environment, *_cache(settings), _threads(settings), load, _memory()]
        progress(0.1, ", ".join(names))
        answers = _gather(probes, progress)
        progress(0.95, "BLAS")
        found += [_blas(), _gpu(answers.get("GPU")), _tf32()]
        works = "put in and taken out again; a small model agrees with stock"
        found.append(_probed("hooks", answers["hooks"], f"{works} ({answers['hooks'].seconds:.1f} s)"))
        found += _optimiser()
        if not quick:
            found += [_compiler(answers["torch.compile"]), _keops(answers.get("KeOps"), keops.keops_problem())]
        found += of_plugins()
    progress(1.0, "done")
    return found


def _gather(probes: Mapping[str, Probe], progress: Progress) -> dict[str, Answer]:
    began = time.monotonic()
    answers: dict[str, Answer] = {}
    while len(answers) < len(probes):
        spent = time.monotonic() - began
        for name, probe in probes.items():
            if name not in answers and (answer := probe.poll(give_up=spent > _LONGEST)) is not None:
                answers[name] = answer
        waiting = ", ".join(name for name in probes if name not in answers)
        progress(0.1 + 0.85 * min(1.0, spent / _LONGEST), waiting)
        time.sleep(0.05)
    return answers


def _versions() -> Finding:
    found = host.current().fields
    install.status()  # finds hooks that cannot be installed
    unknown = known.everything()
    libraries = installed.versions()
    versions = {"python": "", **{library: version for library, (version, _) in libraries.items()}}
    named = [f"{name} {found['versions'].get(name) or version}" for name, version in versions.items()]
    text = f"autokern {found['remarks']['autokern']}, {', '.join(named)}"
    untested = [library for library, (_, tested) in libraries.items() if not tested]
    if unknown:
        listed = "; ".join(f"{name} {why}" for name, why in sorted(unknown.items()))
        tested = "; ".join(f"{library}: {', '.join(table()['releases'][library])}" for library in untested)
        text += f"; tested are {tested}" if tested else ""
        remedy = "install tested releases" if untested else "take out what replaces them"
        advice = f"{remedy}, or set AUTOKERN_UNKNOWN=trust; until then stock runs what relies on these"
        return Finding("versions", "problem" if untested else "note", f"{text}; {listed}", advice)
    if untested:
        text += f"; {', '.join(untested)} not tested, but all that is relied on is known"
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
    known = {row.variable for row in ROWS}
    text = ", ".join(f"{name}={value}" for name, value in ours.items() if name in known)
    if host.multi_rank():
        advice = "measure beforehand with `autokern calibrate`; all ranks then share the profile"
        return Finding("environment", "note", "one of several ranks: nothing is measured here", advice), settings
    return Finding("environment", "ok", text or "no AUTOKERN_* variable is set"), settings


def folder_obstacle(settings: Settings) -> str | None:
    """Return why measurements cannot be stored, or None; creates the folder, writes a file and removes it."""
    path = store.home(settings)
    if path is None:
        return "this user has no cache folder"
    try:
        with contextlib.closing(Folder(path, private=True, create=True)) as folder, folder.temporary("0" * 8, b""):
            return None
    except (OSError, ProfileError) as error:
        return str(error)


def _cache(settings: Settings) -> list[Finding]:
    where = store.home(settings)
    obstacle = folder_obstacle(settings)
    if where is None or obstacle is not None:
        advice = "set AUTOKERN_HOME to a private folder that can be written; until then every process measures anew"
        return [Finding("cache folder", "problem", f"{where or 'none'}: {obstacle}", advice)]
    mode = stat.S_IMODE(where.stat().st_mode)
    return [Finding("cache folder", "ok", f"{where} can be written, mode {mode:04o}"), _profile(settings, where)]


def _profile(settings: Settings, where: Path) -> Finding:
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
    if kept.banned:
        text += f", {len({(b.op, b.candidate) for b in kept.banned})} candidates banned"
    if is_disturbed(kept.trials):
        return Finding("profile", "note", text, f"{again} these on a quiet machine")
    if bad := sum(path.suffix == ".bad" for path in where.iterdir()):
        return Finding("profile", "note", f"{text}; {bad} damaged files put aside", "`autokern clear` removes them")
    return Finding("profile", "ok", text)


def is_disturbed(trials: Sequence[Trial]) -> bool:
    """Whether other programs disturbed more than a third of the trials."""
    return 3 * sum(trial.disturbed for trial in trials) > len(trials)


def _threads(settings: Settings) -> Finding:
    quota, cpus, ceiling = cgroups.cpu_quota(), host.affinity(), host.thread_ceiling()
    used = torch.get_num_threads()
    text = f"torch uses {used}; affinity allows {cpus}, CPU quota {'none' if quota is None else f'{quota:g}'}"
    if used > ceiling and settings.threads == "auto":
        return Finding("threads", "note", text, f"autokern lowers it to {ceiling} while it is enabled")
    if used > ceiling:
        return Finding("threads", "problem", text, f"too many threads wait for each other: OMP_NUM_THREADS={ceiling}")
    idle = used < ceiling and not os.environ.get("OMP_NUM_THREADS")
    physical = f"that leaves {ceiling - used} CPUs idle, which is right if they are hyper-threads"
    return seen("threads", text, f"{physical}; else OMP_NUM_THREADS={ceiling}" if idle else "")


def _load(found: Load) -> Finding:
    advice = "what is measured now counts as disturbed; measure when others have left the cores"
    return seen("load", str(found), advice if found.crowded(torch.get_num_threads()) else "")


def _memory() -> Finding:
    free, total = host.available_memory("cpu"), host.ram()[0]
    text = f"{free / 2**30:.1f} GiB available, of {total / 2**30:.1f} GiB"
    advice = f"enough for some {(free / 32) ** 0.5:.0f} points in float64; free some for more"
    return seen("memory", text, advice if free < _LITTLE_MEMORY else "")


def _blas() -> Finding:
    """Name the BLAS libraries, and time a matrix product by torch and NumPy."""
    import numpy as np
    import threadpoolctl

    versions = host.current().fields["versions"]
    own = ", ".join(f"{name} {versions[name]}" for name in ("mkl", "openblas") if name in versions)
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool.get("user_api") == "blas"]
    names = sorted({f"{pool['internal_api']} {pool.get('version') or ''}".strip() for pool in pools})
    a = torch.ones(700, 700, dtype=torch.float64)
    b = a.numpy()
    speeds = [_speed(lambda: a @ a), _speed(lambda: np.dot(b, b))]
    text = f"torch: {own or versions.get('blas', 'unknown')}, {speeds[0] / 1e9:.0f} Gflop/s in float64; "
    text += f"numpy: {', '.join([*names, f'{speeds[1] / 1e9:.0f}'])}"
    advice = "a matrix product is far too slow: look for other processes, throttling or a reference BLAS"
    return seen("BLAS", text, advice if min(speeds) < _SLOW_GEMM else "")


def _speed(product: Callable[[], object]) -> float:
    """Return the flops a second of a product of size 700."""
    return 2 * 700**3 / min(timer.once(product, lambda: None) for _ in range(4))


def _gpu(answer: Answer | None) -> Finding:
    if answer is not None:
        gpus = host.current().fields["accelerators"]
        names = ", ".join(f"{g['name']} ({g['memory_mib'] / 1024:.0f} GiB)" for g in gpus if "memory_mib" in g)
        return _probed("GPU", answer, f"{names or gpus[0].get('name', 'found')}: a product on it agrees with the CPU's")
    if Path("/proc/driver/nvidia/version").exists():
        text = f"an NVIDIA driver is here, but torch {torch.__version__} finds no device"
        return Finding("GPU", "problem", text, "install a torch that is built for CUDA, or check CUDA_VISIBLE_DEVICES")
    return Finding("GPU", "ok", "none; everything runs on the CPU")


def _tf32() -> Finding:
    settings: dict[str, Any] = {"CUDA devices": torch.backends.cuda, "the CPU": torch.backends.mkldnn}
    precisions = {where: library.matmul.fp32_precision for where, library in settings.items()}
    low = [f"{precision} on {where}" for where, precision in precisions.items() if precision not in ("none", "ieee")]
    text = f"float32 products run in {', '.join(low)}, where that is supported"
    advice = "a GP loses digits that it needs: torch.set_float32_matmul_precision('highest')"
    return seen("TF32", text, advice, "problem") if low else seen("TF32", "off: float32 products are float32")


def _probed(name: str, answer: Answer, works: str, mend: str = _REPORT, slow: str = "", missing: str = "") -> Finding:
    """Judge a probe's answer; `mend`, `slow` and `missing` advise on a failure, a timeout, and a missing compiler."""
    if answer.works:
        return Finding(name, "ok", works)
    if answer.timed_out and slow:
        return Finding(name, "note", answer.text, slow)
    if missing and "compiler" in answer.text.lower():
        return Finding(name, "note", answer.text, missing)
    return Finding(name, "problem", answer.text, mend)


def _optimiser() -> list[Finding]:
    """Warn of a SciPy release with which BoTorch silently leaves its batched optimiser."""
    if importlib.util.find_spec("botorch") is None or generation.scipy_release() < generation.TRIED:
        return []  # before importing BoTorch, which takes 2 s
    from botorch.generation import gen

    if not generation.leaves_batch(gen):
        return []
    text = f"BoTorch leaves its batched L-BFGS-B with SciPy {'.'.join(map(str, generation.scipy_release()))}"
    obstacle = generation.obstacle()
    advice = "acquisitions take two to four times as long: `pip install 'scipy<1.18'`, or a later BoTorch"
    found = f"{text}; {obstacle or 'autokern puts it back, after a trial'}"
    return [seen("BoTorch's optimiser", found, advice if obstacle else "")]


def _compiler(answer: Answer) -> Finding:
    return _probed(
        "torch.compile", answer, f"compiles and runs ({answer.seconds:.1f} s for the first function)",
        mend="AUTOKERN_EXCLUDE=compiled leaves it out; all else works",
        slow="candidates that compile cost more here than they can repay",
        missing="install a C++ compiler (g++ or clang++); until then candidates that compile are left out",
    )  # fmt: skip


def _keops(answer: Answer | None, obstacle: str | None = None) -> Finding:
    """Judge a probe with an empty build folder, and an obstacle to KeOps in this process."""
    if answer is None:
        advice = "`pip install 'autokern[keops]'`, where large kernel products matter"
        return Finding("KeOps", "note", "not installed", advice)
    if answer.works and obstacle is not None:
        return Finding("KeOps", "problem", f"{answer.text}, but {obstacle}", "until then candidates by it are left out")
    if answer.works and "not on the GPU" in answer.text:
        advice = "install the CUDA toolkit (libnvrtc and headers); until then it is left out there"
        return Finding("KeOps", "note", answer.text, advice)
    return _probed(
        "KeOps", answer, answer.text,
        mend="see https://www.kernel-operations.io; AUTOKERN_EXCLUDE=keops leaves it out, all else works",
        slow="its first formula compiles for long; try again when idle",
        missing="repair or install it (g++, or any that CXX names); until then candidates by KeOps are left out",
    )  # fmt: skip
