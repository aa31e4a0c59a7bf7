"""The parameters that a density was computed with, stored for a later evaluation of its prior covariance.

Stock evaluates and caches the prior covariance when it computes the density. A density computed without it stores the
values of the kernel's parameters on the lazy covariance, as plain objects that unpickle without autokern.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from linear_operator.utils.memoize import add_to_cache

from autokern.core.autograd import version
from autokern.model import memoized
from autokern.model.frozen import by_kernel, frozen

_STATE, _EVALUATED = "_autokern_state", "kernel_eval"


def remember(lazy: Any, tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> None:
    """Store a kernel's raw parameters and copies of their values, tensors or arrays, on its lazy covariance."""
    lazy.__dict__[_STATE] = (id(lazy.x1), version(lazy.x1)), tensors, values


def remember_kernel(lazy: Any) -> None:
    """Store the values of all parameters of a kernel, unless the covariance is cached or values are stored."""
    if _STATE not in lazy.__dict__ and not memoized.is_kept(lazy, _EVALUATED):
        tensors = list(lazy.kernel.parameters())
        remember(lazy, tensors, [tensor.detach().clone() for tensor in tensors])


def is_past(lazy: Any) -> bool:
    """Whether points or parameters have changed since `remember`, and the covariance is not evaluated yet."""
    state = lazy.__dict__.get(_STATE)
    if state is None or memoized.is_kept(lazy, _EVALUATED):
        return False
    _, tensors, values = state
    present = {id(tensor) for tensor in lazy.kernel.parameters()} <= {id(tensor) for tensor in tensors}
    same = all(torch.equal(tensor.detach(), _on(tensor, value)) for tensor, value in zip(tensors, values, strict=True))
    return _is_written(lazy) or not (present and same)


def _is_written(lazy: Any) -> bool:
    identity, number = lazy.__dict__[_STATE][0]
    return bool(identity == id(lazy.x1) and number != version(lazy.x1))  # a copy has its own version counter


def _on(tensor: torch.Tensor, value: Any) -> torch.Tensor:
    return torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)


def evaluate(lazy: Any) -> Any:
    """Evaluate and cache a covariance with the stored values, through which gradients reach the parameters.

    Raises RuntimeError if the points were written to, or the kernel has new parameters.
    """
    _, tensors, values = lazy.__dict__[_STATE]
    with torch.enable_grad():  # the grad mode in which the covariance was made
        earlier = {id(tensor): _Earlier.apply(tensor, value) for tensor, value in zip(tensors, values, strict=True)}
        if _is_written(lazy) or any(id(tensor) not in earlier for tensor in lazy.kernel.parameters()):
            raise RuntimeError(
                "the covariance of a prior is read after its points were modified by an inplace operation, or its "
                "parameters replaced, since the density was computed; read it before"
            )
        kernel = frozen(lazy.kernel, lambda tensor: earlier[id(tensor)] if id(tensor) in earlier else tensor.clone())
        return add_to_cache(lazy, _EVALUATED, by_kernel(kernel, lazy).evaluate_kernel())


class _Earlier(torch.autograd.Function):
    """The stored value of a tensor; its gradient is passed on to the tensor."""

    @staticmethod
    def forward(ctx, tensor, value):  # type: ignore[no-untyped-def]
        return _on(tensor, value).clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None
