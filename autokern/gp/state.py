"""The state of a model by its values: the inputs of a factor, and whether they are unchanged.

Version counters miss writes through ``.data``, by gpytorch's setters, or by fused optimisers. So values are compared:
all parameters and buffers, tensors kept as attributes of the libraries' own modules, and the training data: some
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
from autokern.core.recovery import uninterrupted
from autokern.gp.frozen import LIBRARIES
from autokern.gp.mirrors import as_bytes

__all__ = ["State"]

_FEW = 32
"""Elements up to which Python compares numbers faster than torch compares tensors."""
_PLAIN = (bool, int, float, str, torch.Size, type(None), FunctionType, MethodType)
_NOTED = frozenset(("_input_batch_shape", "_aug_batch_shape", "_original_train_inputs"))
"""What BoTorch notes of a model, and notes anew in a fantasy that was just made; no prediction reads it."""
_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class _Held(NamedTuple):
    """A module and what it held: parameters, buffers and parts by address, attributes with a meaning, their number."""

    module: weakref.ref[torch.nn.Module]
    addresses: list[int]
    buffers: dict[str, torch.Tensor | None]
    read: Callable[[dict[str, Any]], tuple[Any, ...]] | None
    attributes: tuple[Any, ...]
    size: int


class State:
    """What a module and the modules in it hold, by identity and by value; it keeps none of them alive.

    Priors do not count: no prediction reads them. A buffer may be another tensor with the same values: BoTorch's input
    transforms detach theirs at each call. Of an exact Gaussian process, the training data count too; `but` and the
    modules in it do not.
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
            read = _reader(module) if type(module).__module__.partition(".")[0] in LIBRARIES else None
            attributes = () if read is None else read(own)
            self._held.append(
                _Held(weakref.ref(module), _addresses(own), dict(own["_buffers"]), read, attributes, len(own))
            )
            found = (*own["_parameters"].values(), *own["_buffers"].values(), *attributes)
            tensors += [t for t in found if isinstance(t, torch.Tensor)]
            stack += [part for part in own["_modules"].values() if part is not None]
        tensors = list({id(t): t for t in tensors}.values())
        self._tensors = [(t, version(t)) for t in tensors]  # alive, so that addresses stay theirs
        few = [(t, t.tolist()) for t in tensors if t.is_cpu and t.numel() <= _FEW]
        self._little = [(t, numbers) for t, numbers in few if t.tolist() == numbers]  # no NaN, which equals nothing
        little = {id(t) for t, _ in self._little}
        self._others = [(t, t.detach().clone()) for t in tensors if id(t) not in little]

    def holds(self) -> bool:
        """Whether everything is as it was: the same objects with the same values."""
        renewed = self._renewed()
        if renewed is None or any(tensor.tolist() != numbers for tensor, numbers in self._little):
            return False
        return _are_still([*renewed, *self._others])

    def counted(self) -> bool:
        """Whether a change shows without a look at values: an object was replaced, or a version counter has moved."""
        renewed = self._renewed()
        return renewed is None or not _are_still(renewed) or any(version(t) != then for t, then in self._tensors)

    def _renewed(self) -> _Pairs | None:
        """Return the buffers that are other tensors now, each with what it was; None if other objects have changed."""
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
    """Return the buffers of a module that are other tensors now; None if it differs by anything else."""
    now, first = own["_buffers"], len(own["_parameters"])
    found = _addresses(own)
    if found[:first] != addresses[:first] or found[first + len(now) :] != addresses[first + len(buffers) :]:
        return None
    if now.keys() != buffers.keys():
        return None
    pairs: _Pairs = []
    for new, old in zip(now.values(), buffers.values(), strict=True):
        if new is old:
            continue
        if new is None or old is None:
            return None
        pairs.append((new, old))
    return pairs


def _data(module: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    own = module.__dict__
    return tuple(t for t in (*(own.get("train_inputs") or ()), own.get("_train_targets")) if t is not None)


def _reader(module: torch.nn.Module) -> Callable[[dict[str, Any]], tuple[Any, ...]] | None:
    """Return what reads the attributes of a module that are numbers, words, functions or tensors."""
    without = _NOTED | {"training"} if type(module) is FixedGaussianNoise else _NOTED  # it has one mode
    kinds, own = (torch.Tensor, *_PLAIN), module.__dict__
    names = [name for name, value in own.items() if isinstance(value, kinds) and name not in without]
    return itemgetter(*names) if len(names) > 1 else None  # every module has several


def _alike(read: Callable[[dict[str, Any]], tuple[Any, ...]], own: dict[str, Any], then: tuple[Any, ...]) -> bool:
    try:
        return read(own) == then  # compares what is not identical
    except uninterrupted(KeyError, RuntimeError, ValueError):  # an attribute is gone, or a tensor was replaced
        return False


def _are_still(pairs: _Pairs) -> bool:
    """Whether each tensor has the content that it is paired with; those on one device are compared by one read."""
    elsewhere: dict[torch.device, _Pairs] = {}
    for tensor, content in pairs:
        if tensor.shape != content.shape or tensor.dtype is not content.dtype or tensor.device != content.device:
            return False
        if not tensor.is_cpu:
            elsewhere.setdefault(tensor.device, []).append((tensor, content))
        elif not torch.equal(tensor, content) and not torch.equal(as_bytes([tensor]), as_bytes([content])):
            return False  # missing observations are NaN, which equals nothing
    return all(torch.equal(*map(as_bytes, zip(*group, strict=True))) for group in elsewhere.values())
