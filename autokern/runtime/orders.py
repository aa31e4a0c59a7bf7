"""Orders: the names of ops and candidates in the user's settings must exist, so that no typing error passes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from fnmatch import fnmatch

import msgspec
import torch

from autokern.core import registry
from autokern.core.errors import AutokernWarning, SettingsError, nearest
from autokern.core.settings import Settings

_REMOVED = (
    ("eigh", "*"), ("solve_triangular", "*"), ("cholesky_inverse", "*"), ("qr", "looped"), ("*", "*@[248]"),
    ("*", "*@16"), ("exact_log_prob", "recursive"), ("inv_quad_logdet", "recursive"), ("kernel_matrix", "symmetric"),
    ("kernel_matmul", "dense"), ("kernel_matmul", "tiled@512"), ("kernel_matmul", "tiled-symmetric@1536"),
    ("kernel_matmul", "compiled"), ("kernel_matmul", "compiled-symmetric"), ("matmul", "*"), ("predict", "rows@*"),
    ("exact_log_prob", "kronecker"), ("exact_log_prob", "mixed"), ("inv_quad_logdet", "mixed"),
    ("kernel_matmul", "tf32"), ("kernel_matmul", "tiled-columns"), ("kernel_matmul", "tiled@2048"),
    ("pinverse_root", "*"), ("cholesky", "looped"), ("exact_log_prob", "merged"),
)  # fmt: skip
"""Removed candidates of earlier versions: patterns of op and candidate."""


def checked(settings: Settings) -> Settings:
    """Return settings without forced candidates that an earlier version had, with one warning for each.

    Raises SettingsError for an unknown op, candidate or device.
    """
    kept = []
    for name, candidate in settings.force:
        with _ignored_if_removed(name, candidate):
            registry.get(name)[candidate]
            kept.append((name, candidate))
    for order in settings.exclude:
        name, equals, candidate = order.rpartition("=")
        with _ignored_if_removed(name, candidate):
            if equals:
                registry.get(name)[candidate]
            else:
                _some_op_has(candidate)
    for name, device, _ in settings.threshold:
        with _ignored_if_removed(name, "cpu"):
            _check_threshold(name, device)
    return msgspec.structs.replace(settings, force=tuple(kept))


@contextlib.contextmanager
def _ignored_if_removed(op: str, candidate: str) -> Iterator[None]:
    """Turn the error about a removed candidate into a warning; without `op`, of any op."""
    try:
        yield
    except SettingsError:
        named = (name for of, name in _REMOVED if (fnmatch(op, of) if op else name != "*"))
        if not any(fnmatch(candidate, name) for name in named):
            raise
        order = f"{op}={candidate}" if op else candidate
        message = f"{order} was ordered; autokern no longer has it, and ignores that: other candidates are as fast"
        warnings.warn(message, AutokernWarning, stacklevel=1)  # level 1: shown once


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
    advice = nearest(candidate, names) or "; `autokern show` and `autokern explain OP` name them"
    raise SettingsError(f"{candidate!r} was excluded, and no op has a candidate of that name{advice}")
