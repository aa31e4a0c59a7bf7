"""What objects hold, to notice whether anything of it was put elsewhere."""

from __future__ import annotations

import functools
import operator
import sys
import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from autokern.core.recovery import caught
from autokern.core.replay.effects import STANDARD, codes, content, is_library, walked

_SMALL = 256
"""Elements of tensors whose numbers are compared, unless told otherwise."""
_SETTINGS = "_state", "_global_value", "_global_float_value", "_global_double_value"
"""Attributes in which settings of the libraries keep their values."""


def held(*of: Any, **options: Any) -> Held:
    """Return what some objects consist of, with the settings of the libraries, and options of `Held`."""
    modules = [sys.modules.get(f"{name}.settings") for name in ("linear_operator", "gpytorch", "botorch")]
    kinds = {one for module in modules if module for one in vars(module).values() if isinstance(one, type)}
    return Held(of, [(kind, name) for kind in kinds for name in _SETTINGS if hasattr(kind, name)], **options)


class Held:
    """What objects consist of, to notice whether anything was put elsewhere: attributes, items, variables, settings.

    Attributes of the user's own classes count. Of numbers that were written in place, those of NumPy's arrays are
    noticed, and those of tensors of at most `most` elements that are no `inputs`. Attributes whose names are in
    `without` may change.
    """

    def __init__(
        self,
        of: Iterable[Any],
        settings: Iterable[tuple[type, str]] = (),
        inputs: Iterable[torch.Tensor] = (),
        spaces: Iterable[Mapping[str, Any]] = (),
        without: Iterable[str] = (),
        most: int = _SMALL,
    ) -> None:
        seen = walked(of)
        self.effect = seen if isinstance(seen, str) else None
        """What calling these objects may do beside computing."""
        every = [] if isinstance(seen, str) else list(seen.values())
        self.tensors = [one for one in every if isinstance(one, torch.Tensor)]
        self._objects = [one for one in every if not isinstance(one, torch.Tensor)]
        self._functions = [one for one in self._objects if isinstance(one, FunctionType)]
        self._arrays = [one for one in self._objects if isinstance(one, np.ndarray)]
        varying = set(map(id, inputs))
        self._tensors = [one for one in self.tensors if id(one) not in varying and _is_small(one, most)]
        own = {base for kind in self.kinds() for base in kind.__mro__ if _is_own(base.__module__)}
        self._settings, self._more, self._without = list(settings), [*spaces, *map(vars, own)], frozenset(without)
        self.renew()

    def kinds(self) -> set[type]:
        """Return the classes of the objects."""
        return set(map(type, self._objects))

    def renew(self) -> None:
        """Take what is there now for unchanged."""
        spaces = [
            space
            for one in self._objects
            for space in (one, getattr(one, "__dict__", None))
            if isinstance(space, dict) and not isinstance(one, (FunctionType, ModuleType))
        ]
        spaces += [f.__kwdefaults__ for f in self._functions if f.__kwdefaults__]
        several = {id(space): space for space in (*self._more, *spaces)}.values()
        self._partly = [space for space in several if not self._without.isdisjoint(space)]
        self._spaces = [space for space in several if self._without.isdisjoint(space)]
        modules = [vars(one) for one in self._objects if isinstance(one, torch.nn.Module)]
        inner = {id(value) for own in modules for name, value in own.items() if name.startswith("_")}
        keyed = [one for one in self._objects if isinstance(one, dict) and id(one) not in inner]
        self._lists = [*(one for one in self._objects if isinstance(one, (list, set))), *keyed]  # of a dict, its keys
        self._cells = [cell for one in self._functions for cell in one.__closure__ or ()]
        self._globals = [(f.__globals__, name) for f in self._functions for name in _names(f)]
        self._kept = self._contents()  # the same address is the same object while it is kept
        self._filters = list(warnings.filters)
        self._copies = [one.tobytes() for one in self._arrays]
        self._places = [(one.data_ptr(), one.stride()) for one in self._tensors]
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for one in self._tensors:  # ``data`` writes without a new version
            by_type.setdefault(one.dtype, []).append(one.detach().reshape(-1))
        self._numbers = [(parts, torch.cat(parts)) for parts in by_type.values()]

    def is_as_before(self) -> bool:
        """Whether everything is where it was."""
        try:
            found = self._contents()
        except caught(RuntimeError):  # it changes at this moment, in another thread
            return False
        return (
            len(found) == len(self._kept)
            and all(map(operator.is_, found, self._kept))
            and warnings.filters == self._filters  # a warning of the recording was filtered
            and [one.tobytes() for one in self._arrays] == self._copies
            and [(one.data_ptr(), one.stride()) for one in self._tensors] == self._places
            and all(torch.equal(torch.cat(parts), numbers) for parts, numbers in self._numbers)
        )

    def _contents(self) -> list[Any]:
        found = [*chain.from_iterable(map(_values, self._spaces)), *chain.from_iterable(self._lists)]
        found += [v for space in self._partly for name, v in space.items() if name not in self._without]
        found += map(len, self._spaces)
        found += map(content, self._cells)
        found += [space.get(name) for space, name in self._globals]
        found += [getattr(kind, name) for kind, name in self._settings]
        found.append(torch.get_default_dtype())
        return found


_values = operator.methodcaller("values")


def _is_own(module: str) -> bool:
    return not is_library(module) and module.partition(".")[0] not in STANDARD


def _is_small(tensor: torch.Tensor, most: int) -> bool:
    """Whether it takes no time to compare a tensor's numbers, of which none is a NaN."""
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_inference()
    return plain and tensor.is_contiguous() and tensor.numel() <= most and not bool(tensor.isnan().any())


@functools.lru_cache(4096)
def _names_of(code: CodeType) -> tuple[str, ...]:
    return tuple({name for part in codes(code) for name in part.co_names})


def _names(function: FunctionType) -> tuple[str, ...]:
    """Return the global variables that a function of the user's own may use."""
    return () if is_library(function.__globals__.get("__name__")) else _names_of(function.__code__)
