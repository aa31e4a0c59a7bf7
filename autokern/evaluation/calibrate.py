"""Calibration with the hooks installed, so that composite ops are measured with their inner ops dispatched."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from autokern import ops as _ops  # noqa: F401  (importing it registers every Op)
from autokern.core.errors import SettingsError
from autokern.core.op import LEVELS
from autokern.core.output import display
from autokern.core.settings import LEVELS_OF_ACCURACY
from autokern.hooks import install
from autokern.runtime import dispatch
from autokern.tuning.profile import Profile


def calibrate(
    ops: str | Iterable[str] | None = None,
    level: str = "quick",
    budget: float = 10.0,
    devices: str | Iterable[str] | None = None,
    progress: bool = True,
    accuracy: str | None = None,
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

    Returns
    -------
    Profile
        All measurements of this machine, the new ones included.

    Raises
    ------
    SettingsError
        For an unknown op, an absent device, an unknown level, or a budget that allows nothing. Also under
        ``AUTOKERN_DETERMINISTIC=1``, which leaves measurements aside.

    Examples
    --------
    >>> profile = autokern.calibrate(["qr"], budget=0.3, devices=["cpu"], progress=False)
    >>> isinstance(profile, autokern.Profile)
    True
    """
    from autokern.evaluation.exam import LEAST, SHARE, examined
    from autokern.tuning import store  # imported here: only calibration needs these
    from autokern.tuning.calibration import calibrate as measure
    from autokern.tuning.calibration import chosen_devices, chosen_ops

    for name, value, of in (("level", level, LEVELS), ("accuracy", accuracy, (None, *LEVELS_OF_ACCURACY))):
        if value not in of:
            raise SettingsError(f"{name} {value!r} was asked for; there are {', '.join(filter(None, of))}")
    if not 0 < budget < math.inf:
        raise SettingsError(f"a budget of {budget:g} s was given; measuring takes more than 0, and ends")
    chosen, kinds = chosen_ops(ops), chosen_devices(devices)
    with install.enabled():
        here = dispatch.session()
        if store.leaves_aside(here.settings):
            raise SettingsError("AUTOKERN_DETERMINISTIC=1 leaves measurements aside; unset it to measure")

        before = here.profile
        wanted = here.settings.accuracy if accuracy is None else accuracy
        options: dict[str, Any] = {"accuracy": wanted, "publish": here.adopt}
        seconds = SHARE * budget if SHARE * budget >= LEAST and "cpu" in kinds else 0.0
        try:
            with display("autokern measures this machine", progress) as shown:
                found = measure(chosen, level, budget - seconds, kinds, before, progress=shown, **options)
                if seconds and found.forests:
                    found = examined(found, level, seconds, shown)
            if here.settings.profile is None:
                store.save(here.settings, found)
            here.adopt(found)
        except BaseException:  # interrupted or failed: the previous profile stays in force
            here.adopt(before)
            raise
    return found
