"""Calibrate with the hooks installed: the parts of composite ops are dispatched while those ops are measured."""

from __future__ import annotations

from collections.abc import Iterable

from autokern import ops as _ops  # noqa: F401  (importing it registers every Op)
from autokern.hooks import install
from autokern.runtime import dispatch
from autokern.system.progress import display
from autokern.tuning.profile import Profile

__all__ = ["calibrate"]


def calibrate(
    ops: Iterable[str] | None = None,
    level: str = "quick",
    budget: float = 10.0,
    devices: Iterable[str] | None = None,
    progress: bool = True,
    accuracy: str | None = None,
) -> Profile:
    """Measure this machine, keep the result for later processes, and use it from now on.

    Parameters
    ----------
    ops : iterable of str, optional
        Names of ops; default all.
    level : {"quick", "full"}
        How many sizes, and how often.
    budget : float
        Seconds; a measurement that would exceed them does not begin.
    devices : iterable of str, optional
        Device kinds; default the CPU and the accelerator that torch finds.
    progress : bool
        Whether to show a progress bar on a terminal.
    accuracy : {"same", "approximate"}, optional
        Whether candidates of lower precision are measured too; default what `AUTOKERN_ACCURACY` says.

    Returns
    -------
    Profile
        All measurements of this machine, the new ones included.

    Raises
    ------
    SettingsError
        For an unknown op, an absent device, an unknown level or a budget that allows nothing.

    Examples
    --------
    >>> profile = autokern.calibrate(["pinverse_root"], budget=0.3, devices=["cpu"], progress=False)
    >>> isinstance(profile, autokern.Profile)
    True
    """
    from autokern.tuning import store  # programs that measure nothing need none of this
    from autokern.tuning.calibration import calibrate as measure
    from autokern.tuning.calibration import chosen_devices, chosen_ops

    chosen, kinds = chosen_ops(ops), chosen_devices(devices)
    with install.enabled():  # parts of composite ops are dispatched while those are measured
        here = dispatch.session()

        def publish(found: Profile) -> None:
            if here.settings.profile is None:
                store.save(here.settings, found)
            here.adopt(found)

        with display("autokern measures this machine", progress) as shown:
            wanted = here.settings.accuracy if accuracy is None else accuracy
            return measure(chosen, level, budget, kinds, here.profile, accuracy=wanted, progress=shown, publish=publish)
