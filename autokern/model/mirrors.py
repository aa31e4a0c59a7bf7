"""CPU copies of tensors on an accelerator, all updated by one transfer and written back by one transfer.

Transfers of single parameters would take longer than all arithmetic of a small model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from autokern.kernels.array_parts import Array


def as_bytes(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the contents of tensors on one device, of any dtypes, concatenated as bytes on that device."""
    return torch.cat([t.detach().reshape(-1).contiguous().view(torch.uint8) for t in tensors])


def sent(arrays: Sequence[Array], targets: Sequence[torch.Tensor]) -> None:
    """Copy arrays into tensors of one dtype on one device by one transfer."""
    if not targets:
        return
    flat = torch.from_numpy(np.concatenate([a.ravel() for a in arrays])).to(targets[0].device)
    parts = flat.split([a.size for a in arrays])
    plain = [t.detach() for t in targets]
    torch._foreach_copy_(plain, [part.view(t.shape) for part, t in zip(parts, plain, strict=True)])


def placed(tensors: Sequence[torch.Tensor | None], device: torch.device) -> list[torch.Tensor | None]:
    """Return copies of CPU tensors on a device by one transfer; the tensors themselves if that is the CPU."""
    if device.type == "cpu":
        return list(tensors)
    there = [None if t is None else torch.empty_like(t, device=device) for t in tensors]
    sent([t.numpy() for t in tensors if t is not None], [t for t in there if t is not None])
    return there


def fetched(tensors: Sequence[torch.Tensor]) -> list[Array]:
    """Return tensors of one dtype on one device as arrays by one transfer; CPU tensors share their memory."""
    if tensors[0].is_cpu:
        return [t.detach().numpy() for t in tensors]
    flat = torch.cat([t.detach().reshape(-1) for t in tensors]).cpu()
    parts = flat.split([t.numel() for t in tensors])
    return [part.view(t.shape).numpy() for part, t in zip(parts, tensors, strict=True)]


class Mirrors:
    """CPU copies of tensors on one accelerator; holds the tensors.

    If `still`, `pull` does nothing, since the owner detects changes in another way.
    """

    def __init__(self, still: bool = False) -> None:
        self._still = still
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the contiguous copy of a tensor, made on first use; ValueError for a second device."""
        known = self._pairs.get(id(tensor))
        if known is None:
            if any(t.device != tensor.device for t, _ in self._pairs.values()):
                raise ValueError(f"tensors on {tensor.device} and on another accelerator")
            copied = tensor.detach().cpu().contiguous()
            known = self._pairs[id(tensor)] = tensor, copied
        return known[1]

    def pull(self) -> None:
        """Update all copies by one transfer, unless they are `still`."""
        if self._still or not self._pairs:
            return
        flat, start = as_bytes(tensor for tensor, _ in self._pairs.values()).cpu().numpy(), 0
        for _, copied in self._pairs.values():
            own = copied.view(-1).view(torch.uint8).numpy()
            stop = start + own.size
            own[:] = flat[start:stop]
            start = stop
