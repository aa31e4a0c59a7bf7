"""States of the random generators, which autokern's own checks and measurements must not advance.

Stock's conjugate gradients draw probes, so a call that is timed or checked would change every random number that the
user draws afterwards.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import torch

from autokern.system import host


def untouched() -> contextlib.AbstractContextManager[None]:
    """Return a context that restores the states of torch's generators, the accelerator's included."""
    device = host.accelerator()
    if device is None or device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def states() -> tuple[Any, ...]:
    """Return the states of the default generators of torch (CPU), Python and NumPy."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def take(found: tuple[Any, ...]) -> None:
    """Restore states that `states` has returned."""
    torch.set_rng_state(found[0])
    random.setstate(found[1])
    np.random.set_state(found[2])
