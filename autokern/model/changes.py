"""Detects changes of a model's state, on which a cached factor depends.

Version counters miss writes through ``.data``, by gpytorch's setters, or by fused optimisers. So values are compared:
all parameters and buffers, tensor attributes of the libraries' own modules, and the training data. These are some
hundreds of numbers beside a matrix of n^2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import is_, itemgetter
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from gpytorch.likelihoods.noise_models import FixedGaussianNoise
from gpytorch.priors import Prior

from autokern.core.autograd import version
from autokern.core.errors import uninterrupted
from autokern.core.releases import is_of_libraries
from autokern.model.parameters import as_bytes

_FEW = 32
"""Most elements for which comparing Python numbers is faster than `torch.equal`."""
_PLAIN = (bool, int, float, str, torch.Size, type(None), FunctionType, MethodType)
_NOTED = frozenset(("_input_batch_shape", "_aug_batch_shape", "_original_train_inputs"))
"""Attributes that BoTorch sets on a model, and again on a new fantasy, and that no prediction reads."""
_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class _Held(NamedTuple):
    """The recorded state of one module."""

    module: weakref.ref[torch.nn.Module]
    addresses: list[int]  # the `id` of each parameter, buffer and submodule
    buffers: dict[str, torch.Tensor | None]
    read: Callable[[dict[str, Any]], tuple[Any, ...]] | None  # reads the attributes from a module's `__dict__`
    attributes: tuple[Any, ...]
    size: int  # number of entries of its `__dict__`


class State:
    """The state of a module and its submodules, by identity and by value, without references to the modules.

    It includes the training data of an exact Gaussian process, and leaves out priors, which no prediction reads, and
    `but` with its submodules. A buffer may be replaced by another tensor with the same values, as BoTorch's input
    transforms do at each call.
    """

    def __init__(self, root: torch.nn.Module, but: torch.nn.Module | None = None) -> None:
        self._held: list[_Held] = []
        self._data = _data(root)
        tensors = list(self._data)
        seen, stack = {id(but)}, [root]
        while stack:
            module = stack.pop()
            if id(module) in seen or isinstance(module, Prior):
                continue
            seen.add(id(module))
            own = module.__dict__
            read = _reader(module) if is_of_libraries(type(module).__module__) else None
            attributes = () if read is None else read(own)
            self._held.append(
                _Held(weakref.ref(module), _addresses(own), dict(own["_buffers"]), read, attributes, len(own))
            )
            found = (*own["_parameters"].values(), *own["_buffers"].values(), *attributes)
            tensors += [t for t in found if isinstance(t, torch.Tensor)]
            stack += [part for part in own["_modules"].values() if part is not None]
        tensors = list({id(t): t for t in tensors}.values())
        self._tensors = [(t, version(t)) for t in tensors]  # keeps them alive, so that no `id` is used again
        few = [(t, t.tolist()) for t in tensors if t.is_cpu and t.numel() <= _FEW]
        self._little = [(t, numbers) for t, numbers in few if t.tolist() == numbers]  # without NaN, unequal to itself
        little = {id(t) for t, _ in self._little}
        self._others = [(t, t.detach().clone()) for t in tensors if id(t) not in little]

    def holds(self) -> bool:
        """Whether the module has the same objects with the same values."""
        renewed = self._renewed()
        if renewed is None or any(tensor.tolist() != numbers for tensor, numbers in self._little):
            return False
        return _are_still([*renewed, *self._others])

    def counted(self) -> bool:
        """Whether an object was replaced or a version counter has changed; most values are not compared."""
        renewed = self._renewed()
        return renewed is None or not _are_still(renewed) or any(version(t) != then for t, then in self._tensors)

    def _renewed(self) -> _Pairs | None:
        """Return pairs of the new and the old tensor of replaced buffers; None if anything else was replaced."""
        found: _Pairs = []
        for ref, addresses, buffers, read, attributes, size in self._held:
            module = ref()
            if module is None:
                return None
            own = module.__dict__
            if _addresses(own) != addresses:
                pairs = _other_buffers(own, addresses, buffers)
                if pairs is None:
                    return None
                found += pairs
            if read is not None and (len(own) != size or not _alike(read, own, attributes)):
                return None
        root = self._held[0].module()
        now = None if root is None else _data(root)
        same = now is not None and len(now) == len(self._data) and all(map(is_, now, self._data))
        return found if same else None


def _addresses(own: dict[str, Any]) -> list[int]:
    parameters, buffers, parts = own["_parameters"], own["_buffers"], own["_modules"]
    return [*map(id, parameters.values()), *map(id, buffers.values()), *map(id, parts.values())]


def _other_buffers(own: dict[str, Any], addresses: list[int], buffers: dict[str, torch.Tensor | None]) -> _Pairs | None:
    """Return pairs of the new and the old tensor of a module's replaced buffers; None if it differs otherwise."""
    now, first = own["_buffers"], len(own["_parameters"])
    found = _addresses(own)
    same = found[:first] == addresses[:first] and found[first + len(now) :] == addresses[first + len(buffers) :]
    if not same or now.keys() != buffers.keys():
        return None
    pairs: Any = [(new, old) for new, old in zip(now.values(), buffers.values(), strict=True) if new is not old]
    return None if any(new is None or old is None for new, old in pairs) else pairs


def _data(module: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    own = module.__dict__
    return tuple(t for t in (*(own.get("train_inputs") or ()), own.get("_train_targets")) if t is not None)


def _reader(module: torch.nn.Module) -> Callable[[dict[str, Any]], tuple[Any, ...]] | None:
    """Return a getter of the module's attributes that are numbers, strings, functions or tensors."""
    without = _NOTED | {"training"} if type(module) is FixedGaussianNoise else _NOTED  # it ignores its mode
    kinds, own = (torch.Tensor, *_PLAIN), module.__dict__
    names = [name for name, value in own.items() if isinstance(value, kinds) and name not in without]
    return itemgetter(*names) if len(names) > 1 else None  # a library's module has several


def _alike(read: Callable[[dict[str, Any]], tuple[Any, ...]], own: dict[str, Any], then: tuple[Any, ...]) -> bool:
    try:
        return read(own) == then  # identical objects count as equal; tensors of several elements raise otherwise
    except uninterrupted(KeyError, RuntimeError, ValueError):  # an attribute was deleted, or a tensor replaced
        return False


def _are_still(pairs: _Pairs) -> bool:
    """Whether the tensors of each pair have equal contents; those on one accelerator are compared by one read."""
    elsewhere: dict[torch.device, _Pairs] = {}
    for tensor, content in pairs:
        if tensor.shape != content.shape or tensor.dtype is not content.dtype or tensor.device != content.device:
            return False
        if not tensor.is_cpu:
            elsewhere.setdefault(tensor.device, []).append((tensor, content))
        elif not torch.equal(tensor, content) and not torch.equal(as_bytes([tensor]), as_bytes([content])):
            return False  # bytes decide on missing observations, which are NaN
    return all(torch.equal(*map(as_bytes, zip(*group, strict=True))) for group in elsewhere.values())
