"""Memory of a recording: results that are needed at different times share it, so that a replay stays in the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

Noted = tuple[Callable[[], Any], set[int], set[int]]
"""A step with the addresses of the memory that it reads, and of the memory that it writes."""


def share(
    steps: Sequence[Noted], kept: Iterable[int], address: Callable[[torch.Tensor], int]
) -> list[Callable[[], Any]]:
    """Return the steps with their tensors, but those at `kept` addresses, in memory that they share.

    Memory is taken by the step that writes it first, and free after the last step that uses it.
    """
    tensors = {id(t): t for step, _, _ in steps for t in _tensors(step)}
    at_kept = {*kept, *(address(t) for t in tensors.values() if t.is_neg())}
    last = {memory: at for at, (_, reads, writes) in enumerate(steps) for memory in reads | writes}
    sizes = {address(t): t.untyped_storage().nbytes() for t in tensors.values()}
    free, taken = list[torch.UntypedStorage](), dict[int, torch.UntypedStorage]()
    for at, (_, reads, writes) in enumerate(steps):
        for memory in writes - at_kept - taken.keys():
            taken[memory] = _fitting(free, sizes[memory])
        free += [taken[memory] for memory in (reads | writes) & taken.keys() if last[memory] == at]
    moved = {}
    for key, t in tensors.items():
        if (memory := address(t)) in taken:
            moved[key] = torch.empty(0, dtype=t.dtype).set_(taken[memory], t.storage_offset(), t.size(), t.stride())
    return [_moved(step, moved) for step, _, _ in steps]


def _fitting(free: list[torch.UntypedStorage], size: int) -> torch.UntypedStorage:
    """Take free memory that is about as large, what was freed last first, or new memory."""
    for at in range(len(free) - 1, -1, -1):
        if size <= free[at].nbytes() <= 2 * size + 64:
            return free.pop(at)
    return torch.empty(size, dtype=torch.uint8).untyped_storage()


def _tensors(one: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a step holds."""
    if isinstance(one, torch.Tensor):
        yield one
    elif isinstance(one, functools.partial):
        for part in (one.func, *one.args, *one.keywords.values()):
            yield from _tensors(part)
    elif isinstance(one, (list, tuple)):
        for part in one:
            yield from _tensors(part)
    elif isinstance(getattr(one, "__self__", None), torch.Tensor):
        yield one.__self__


def _moved(one: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """Return what a step holds with other tensors."""
    if isinstance(one, torch.Tensor):
        return tensors.get(id(one), one)
    if isinstance(one, functools.partial):
        named = {name: _moved(part, tensors) for name, part in one.keywords.items()}
        return functools.partial(_moved(one.func, tensors), *(_moved(part, tensors) for part in one.args), **named)
    if type(one) in (list, tuple):
        return type(one)(_moved(part, tensors) for part in one)
    if isinstance(getattr(one, "__self__", None), torch.Tensor):
        return getattr(_moved(one.__self__, tensors), one.__name__)
    return one
