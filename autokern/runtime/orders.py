"""Orders: the names of ops and candidates in the user's settings must exist, so that no typing error passes."""

from __future__ import annotations

import difflib

import torch

from autokern.core import registry
from autokern.core.errors import SettingsError
from autokern.core.settings import Settings


def check(settings: Settings) -> None:
    """Raise SettingsError for an unknown op, candidate or device."""
    for name, candidate in settings.force:
        registry.get(name)[candidate]
    for order in settings.exclude:
        name, equals, candidate = order.rpartition("=")
        if equals:
            registry.get(name)[candidate]
        else:
            _some_op_has(candidate)
    for name, device, _ in settings.threshold:
        _check_threshold(name, device)


def _check_threshold(op: str, device: str) -> None:
    if "cpu" not in registry.get(op).names():
        raise SettingsError(f"a threshold of op {op} was given; only ops with a candidate 'cpu' have one")
    try:
        torch.device(device)
    except RuntimeError:
        raise SettingsError(f"a threshold of {op}:{device} was given; torch knows no such device") from None


def _some_op_has(candidate: str) -> None:
    for ops in (registry.present, registry.registered):  # plugins are loaded only if a name is not found
        names = {found.name for op in ops() for found in op.listed}
        if candidate in names:
            return
    near = difflib.get_close_matches(candidate, sorted(names), 1)
    advice = f"did you mean {near[0]!r}?" if near else "`autokern show` and `autokern explain OP` name them"
    raise SettingsError(f"{candidate!r} was excluded, and no op has a candidate of that name; {advice}")
