"""Calibrate with the hooks installed: the parts of composite ops are dispatched while those ops are measured."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from autokern import ops as _ops  # noqa: F401  (importing it registers every Op)
from autokern.core.errors import AutokernWarning, SettingsError
from autokern.hooks import install
from autokern.runtime import dispatch
from autokern.system.progress import display
from autokern.tuning.profile import Profile

if TYPE_CHECKING:
    from autokern.tuning.workload import Workload

__all__ = ["calibrate"]


def calibrate(
    ops: str | Iterable[str] | None = None,
    level: str = "quick",
    budget: float = 10.0,
    devices: str | Iterable[str] | None = None,
    progress: bool = True,
    accuracy: str | None = None,
    workload: Workload | str | os.PathLike[str] | None = None,
    thorough: bool = False,
) -> Profile:
    """Measure this machine, keep the result for later processes, and use it from now on.

    Parameters
    ----------
    ops : str or iterable of str, optional
        Names of ops; default all.
    level : {"quick", "full"}
        How many sizes, and how often.
    budget : float
        Seconds; a measurement that would exceed them does not begin.
    devices : str or iterable of str, optional
        Device kinds; default the CPU and the accelerator that torch finds.
    progress : bool
        Whether to show a progress bar on a terminal.
    accuracy : {"same", "approximate"}, optional
        Whether candidates of lower precision are measured too; default what `AUTOKERN_ACCURACY` says.
    workload : path, optional
        A file that `autokern record` or `AUTOKERN_RECORD` wrote: its problems are measured, and no others, those that
        take programs most time first. Problems that this machine cannot measure are left out, with one warning.
    thorough : bool
        Whether candidates are measured too that never won on another machine.

    Returns
    -------
    Profile
        All measurements of this machine, the new ones included.

    Raises
    ------
    SettingsError
        For an unknown op, an absent device, an unknown level, a budget that allows nothing, or a workload of which
        nothing can be measured here. Also under ``AUTOKERN_DETERMINISTIC=1``, which leaves measurements aside.
    ProfileError
        If the workload cannot be read.

    Examples
    --------
    >>> profile = autokern.calibrate(["pinverse_root"], budget=0.3, devices=["cpu"], progress=False)
    >>> isinstance(profile, autokern.Profile)
    True
    """
    from autokern.tuning import layers, store  # programs that measure nothing need none of this
    from autokern.tuning.calibration import calibrate as measure
    from autokern.tuning.calibration import chosen_devices, chosen_ops
    from autokern.tuning.workload import unmeasured

    chosen, kinds = chosen_ops(ops), chosen_devices(devices)
    asked = None if workload is None else _asked(workload, [op.name for op in chosen], kinds)
    with install.enabled():  # parts of composite ops are dispatched while those are measured
        here = dispatch.session()
        if layers.leaves_aside(here.settings):
            raise SettingsError("AUTOKERN_DETERMINISTIC=1 leaves measurements aside; unset it to measure")

        def publish(found: Profile) -> None:
            if here.settings.profile is None:
                store.save(here.settings, found)
            here.adopt(found)

        wanted = here.settings.accuracy if accuracy is None else accuracy
        with display("autokern measures this machine", progress) as shown:
            found = measure(
                chosen,
                level,
                budget,
                kinds,
                here.profile,
                accuracy=wanted,
                kin=here.model.kin,
                workload=asked,
                thorough=thorough,
                progress=shown,
                publish=publish,
            )
    if asked is not None and (missing := unmeasured(asked, found, level, wanted)):
        told = f"{missing} of {len(asked.calls)} problems of the workload are not measured, nor any like them: the "
        told += "budget was short, candidates have lost too often, or their op has no samples of their kind"
        warnings.warn(told, AutokernWarning, stacklevel=2)
    return found


def _asked(workload: Workload | str | os.PathLike[str], ops: list[str], kinds: list[str]) -> Workload:
    """Return the problems of a workload that are of some ops and can be measured here."""
    from autokern.tuning.workload import Workload, read, served

    whole = workload if isinstance(workload, Workload) else read(Path(workload))
    found, left_out = served(whole, kinds)
    if left_out:
        warnings.warn(left_out, AutokernWarning, stacklevel=3)
    calls = {problem: count for problem, count in found.calls.items() if problem.op in ops}
    if not calls:
        raise SettingsError(f"the workload has no problem of {', '.join(ops)} on {', '.join(kinds)}; record another")
    return Workload(calls, found.recordings)
