"""Input transforms of BoTorch that are a fixed function of the training points: the library's own are run once."""

from __future__ import annotations

import sys
from typing import Any

import torch

from autokern.gp.inspected import Inspected, UnreadError

__all__ = ["transformed"]

_HOME = "botorch.models.transforms.input"
_KINDS = (
    "AffineInputTransform", "ChainedInputTransform", "FilterFeatures", "InputStandardize", "Log10", "Normalize", "Round"
)  # fmt: skip
_PLAIN = (bool, int, float, str, type(None), torch.Size)
_NONE = frozenset(vars(torch.nn.Module()))


def transformed(seen: Inspected, transform: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return points as a transform of known kind maps them now; what it learns from them, it learns as ever.

    Later changes of its settings and of its buffers will be seen.
    """
    space = vars(sys.modules[_HOME]) if _HOME in sys.modules else {}
    kinds = {space[name] for name in _KINDS if name in space}
    parts = list(transform.modules())
    for part in parts:
        if type(part) not in kinds:
            raise UnreadError(f"an input transform {type(part).__name__}")
        if not part.training:
            raise UnreadError("an input transform in evaluation mode")
        _settings(seen, part)
    seen.look(*parts)
    found: torch.Tensor = transform(x)
    for part in parts:
        for name in part._buffers:
            seen.unchanging(seen.buffer(part, name))
        for name in part._modules:
            seen.module(part, name)
    return found


def _settings(seen: Inspected, part: Any) -> None:
    for name in [*vars(part).keys() - _NONE, "training"]:
        value = seen.attribute(part, name)
        if type(value) is dict:
            seen.spelt(value)
        elif type(value) not in _PLAIN:
            raise UnreadError(f"a transform's {name}, a {type(value).__name__}")
