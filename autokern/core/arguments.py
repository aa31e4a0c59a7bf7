"""Walk the arguments of an op: yield their tensors, or copy them without caches.

Both functions dispatch on the type; `model/marginal.py` registers operators, distributions and prediction strategies.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


@functools.singledispatch
def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors and modules' parameters of nested arguments in order; one that occurs twice comes twice."""
    yield from ()


@tensors_in.register
def _(value: torch.Tensor) -> Iterator[torch.Tensor]:
    yield value


@tensors_in.register
def _(value: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from value.parameters()


@tensors_in.register(Sequence)
def _(value: Sequence[Any]) -> Iterator[torch.Tensor]:
    if not isinstance(value, str):
        for item in value:
            yield from tensors_in(item)


def itself(leaf: Any) -> Any:
    """Return a leaf as it is."""
    return leaf


@functools.singledispatch
def rebuilt(value: Any, leaf: Callable[[Any], Any] = itself) -> Any:
    """Return a copy without caches, with `leaf` applied to each tensor and module."""
    return value


@rebuilt.register(torch.Tensor)
@rebuilt.register(torch.nn.Module)
def _(value: Any, leaf: Callable[[Any], Any] = itself) -> Any:
    return leaf(value)


@rebuilt.register(tuple)
@rebuilt.register(list)
def _(value: Any, leaf: Callable[[Any], Any] = itself) -> Any:
    if isinstance(value, torch.Size):
        return value
    return getattr(value, "_make", type(value))(rebuilt(item, leaf) for item in value)


def converted(
    args: tuple[Any, ...], dtype: torch.dtype, altered: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> tuple[Any, ...]:
    """Copy arguments to autograd leaves of a dtype; an object that occurs twice is copied once.

    `altered` is applied to each floating-point tensor and to each parameter of a module.
    """
    copies: dict[int, Any] = {}

    def leaf(value: Any) -> Any:
        if id(value) not in copies:
            if isinstance(value, torch.Tensor):
                plain = value.detach().to(dtype) if value.is_floating_point() else value
                plain = altered(plain) if altered is not None and value.is_floating_point() else plain
                copies[id(value)] = plain.requires_grad_(value.requires_grad)
            else:
                copies[id(value)] = copy.deepcopy(value).to(dtype)
                if altered is not None:
                    for parameter in copies[id(value)].parameters():
                        parameter.data.copy_(altered(parameter.detach()))
        return copies[id(value)]

    made: tuple[Any, ...] = rebuilt(args, leaf)
    return made
