"""Parameters as a density was computed with: a prior covariance that is read later is evaluated with these.

Stock evaluates the covariance for the density and keeps it. A density that is computed without it leaves the values of
the kernel's parameters on the lazy covariance, as plain objects that load where autokern is not installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from linear_operator.utils.memoize import add_to_cache

from autokern.core.autograd import version
from autokern.gp import memoized
from autokern.gp.frozen import frozen
from autokern.gp.lazy_covariance import by_kernel

__all__ = ["evaluate", "is_past", "remember", "remember_kernel"]

_STATE, _EVALUATED = "_autokern_state", "kernel_eval"


def remember(lazy: Any, tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> None:
    """Keep the values of a kernel's raw parameters on its lazy covariance: copies, as tensors or arrays."""
    lazy.__dict__[_STATE] = (id(lazy.x1), version(lazy.x1)), tensors, values


def remember_kernel(lazy: Any) -> None:
    """Keep the present values of all parameters of a kernel, unless the covariance or its state is kept already."""
    if _STATE not in lazy.__dict__ and not memoized.is_kept(lazy, _EVALUATED):
        tensors = list(lazy.kernel.parameters())
        remember(lazy, tensors, [tensor.detach().clone() for tensor in tensors])


def is_past(lazy: Any) -> bool:
    """Whether a covariance that is not evaluated belongs to values that its points or parameters have no longer."""
    state = lazy.__dict__.get(_STATE)
    if state is None or memoized.is_kept(lazy, _EVALUATED):
        return False
    _, tensors, values = state
    present = {id(tensor) for tensor in lazy.kernel.parameters()} <= {id(tensor) for tensor in tensors}
    same = all(torch.equal(tensor.detach(), _on(tensor, value)) for tensor, value in zip(tensors, values, strict=True))
    return _is_written(lazy) or not (present and same)


def _is_written(lazy: Any) -> bool:
    identity, number = lazy.__dict__[_STATE][0]
    return bool(identity == id(lazy.x1) and number != version(lazy.x1))  # a copy has versions of its own


def _on(tensor: torch.Tensor, value: Any) -> torch.Tensor:
    return torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)


def evaluate(lazy: Any) -> Any:
    """Evaluate a covariance for good with the earlier values, as functions of the parameters.

    RuntimeError if the points were written into, or the kernel has parameters that it did not have.
    """
    _, tensors, values = lazy.__dict__[_STATE]
    with torch.enable_grad():  # as the covariance was made
        earlier = {id(tensor): _Earlier.apply(tensor, value) for tensor, value in zip(tensors, values, strict=True)}
        if _is_written(lazy) or any(id(tensor) not in earlier for tensor in lazy.kernel.parameters()):
            raise RuntimeError(
                "the covariance of a prior is read after its points were modified by an inplace operation, or its "
                "parameters replaced, since the density was computed; read it before"
            )
        kernel = frozen(lazy.kernel, lambda tensor: earlier[id(tensor)] if id(tensor) in earlier else tensor.clone())
        return add_to_cache(lazy, _EVALUATED, by_kernel(kernel, lazy).evaluate_kernel())


class _Earlier(torch.autograd.Function):
    """The earlier value of a tensor, whose gradient is the tensor's."""

    @staticmethod
    def forward(ctx, tensor, value):  # type: ignore[no-untyped-def]
        return _on(tensor, value).clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None
