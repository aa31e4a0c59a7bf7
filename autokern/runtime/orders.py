"""Orders: names in the user's settings must be of ops and candidates that there are, so that no typing error passes."""

from __future__ import annotations

import difflib

import torch

from autokern.core import registry
from autokern.core.errors import SettingsError
from autokern.core.settings import Settings

__all__ = ["check"]


def check(settings: Settings) -> None:
    """Check the names in orders.

    Raises SettingsError for an op, candidate or device that there is not.
    """
    for name, candidate in settings.force:
        registry.get(name)[candidate]
    for order in settings.exclude:
        name, equals, candidate = order.rpartition("=")
        if equals:
            registry.get(name)[candidate]
        else:
            _some_op_has(candidate)
    for name, device, _ in settings.threshold:
        if "cpu" not in registry.get(name).names():
            raise SettingsError(f"a threshold of op {name} was given; only ops with a candidate 'cpu' have one")
        try:
            torch.device(device)
        except RuntimeError:
            raise SettingsError(f"a threshold of {name}:{device} was given; torch knows no such device") from None


def _some_op_has(candidate: str) -> None:
    for ops in (registry.present, registry.registered):  # plugins are loaded only where they decide
        names = {found.name for op in ops() for found in op.listed}
        if candidate in names:
            return
    near = difflib.get_close_matches(candidate, sorted(names), 1)
    advice = f"did you mean {near[0]!r}?" if near else "`autokern show` and `autokern explain OP` name them"
    raise SettingsError(f"{candidate!r} was excluded, and no op has a candidate of that name; {advice}")
