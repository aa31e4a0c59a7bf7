"""Shared by all autograd functions: cotangents batched by vmap, and tensors that the caller may write into.

Closed-form backward passes work in place and have no batching rules. Under vmap (``is_grads_batched=True``, or
`torch.vmap` over `torch.autograd.grad`) they run once for each cotangent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad

SPENT = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)
"""What torch says of a graph whose saved values are freed."""

_torch: Any = torch  # the functions below vmap are not declared
_functorch: Any = torch._C._functorch
_is_old: Callable[[Any], bool] = _functorch.is_legacy_batchedtensor
_is_new: Callable[[Any], bool] = _functorch.is_batchedtensor
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the present backward pass keeps the graph."""


def each_cotangent(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward pass that runs once for each cotangent of a batch of vmap, and directly for all others."""

    @functools.wraps(backward)
    def served(ctx: Any, *grads: Any) -> Any:
        for grad in grads:
            if grad is not None and (_is_new(grad) or _is_old(grad)):
                return _outside(served, ctx, grads, _is_old(grad))
        return backward(ctx, *grads)

    return served


def _outside(served: Callable[..., Any], ctx: Any, grads: tuple[Any, ...], old: bool) -> Any:
    """Leave the innermost vmap, serve its cotangents one by one, and stack the results for it.

    torch has two implementations of vmap: an old one behind ``is_grads_batched``, and `torch.vmap`.
    """
    if old:
        level = max(max(_levels(g)) for g in grads if _has(_is_old, g))
        parts = [
            _torch._remove_batch_dim(g, level, 1, 0).unbind() if _has(_is_old, g) and level in _levels(g) else g
            for g in grads
        ]
        return tuple(g if g is None else _torch._add_batch_dim(g, 0, level) for g in _together(served, ctx, parts))
    level = _functorch.maybe_current_level()
    parts = [_unwrapped(g) if _has(_is_new, g) and _functorch.maybe_get_level(g) == level else g for g in grads]
    with temporarily_pop_interpreter_stack():
        found = _together(served, ctx, parts)
    return tuple(g if g is None else _functorch._add_batch_dim(g, 0, level) for g in found)


def _levels(grad: Any) -> list[int]:
    """Return the levels of the old vmap in a tensor, innermost last.

    They are read off the tensor: a GPU's backward pass runs in a thread of its own, where none is counted.
    """
    found, level = [], 0
    while _is_old(grad):
        level += 1
        one, two = (_torch._remove_batch_dim(grad, level, size, 0) for size in (1, 2))
        if one.shape == two.shape:  # the size is used only where the tensor lacks the level
            found.append(level)
            grad = one
    return found


def _has(kind: Callable[[Any], bool], grad: Any) -> bool:
    return grad is not None and kind(grad)


def _unwrapped(grad: Any) -> Any:
    return _functorch.get_unwrapped(grad).movedim(_functorch.maybe_get_bdim(grad), 0).unbind()


def _together(served: Callable[..., Any], ctx: Any, parts: list[Any]) -> tuple[Any, ...]:
    """Serve each element of the unbound cotangents together with the unbatched ones, and stack the results."""
    count = max((len(p) for p in parts if isinstance(p, tuple)), default=1)
    each = [served(ctx, *(p[i] if isinstance(p, tuple) else p for p in parts)) for i in range(count)]
    columns = zip(*(found if isinstance(found, tuple) else (found,) for found in each), strict=True)
    return tuple(None if column[0] is None else torch.stack(column) for column in columns)


def has_duals() -> bool:
    """Whether tensors may have tangents of forward mode, which arrays would lose."""
    return forward_ad._current_level >= 0


def readable(*tensors: torch.Tensor) -> bool:
    """Whether NumPy can read these tensors of the CPU without losing anything that autograd knows of them."""
    return not has_duals() and not any(t._is_zerotensor() or t.is_inference() for t in tensors)


def spent_by_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward pass that frees ``ctx.gradients`` unless the graph is kept, and raises as torch when repeated.

    It goes outside of `each_cotangent`, which runs a pass several times.
    """

    @functools.wraps(backward)
    def spent(ctx: Any, *grads: Any) -> Any:
        if ctx.gradients is None:
            raise RuntimeError(SPENT)
        kept = keeps_graph()
        found = backward(ctx, *grads)
        if not kept:
            ctx.gradients = None
        return found

    return spent


def plain_gradients(
    function: Callable[..., torch.Tensor | Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor | None],
    wanted: Sequence[bool],
    cotangents: torch.Tensor | Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Return the gradients of a plain function by the wanted inputs, differentiable where gradients are enabled.

    Each input is a view of its own, because one tensor may occur twice, or depend on another.
    """
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [t.view_as(t) if want and t is not None else t for t, want in zip(inputs, wanted, strict=True)]
        sources = [tensor for tensor, want in zip(own, wanted, strict=True) if want and tensor is not None]
        outs = function(*own)
    found = iter(torch.autograd.grad(outs, sources, cotangents, create_graph=graph))
    return [next(found) if want else None for want in wanted]


def times(
    gradients: Sequence[Any], cotangent: torch.Tensor, shapes: Sequence[torch.Size], wanted: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Return the wanted ones of the gradients of each model of a batch, times the cotangent of its value.

    Inputs of these shapes that several models share get the sum over them.
    """
    if not cotangent.dim():
        found = iter(torch._foreach_mul([t for t, want in zip(gradients, wanted, strict=True) if want], cotangent))
        return [next(found) if want else None for want in wanted]

    def one(gradient: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        each = cotangent.view(*cotangent.shape, *(1,) * (gradient.dim() - cotangent.dim()))
        return (gradient * each).sum_to_size(shape)

    listed = zip(gradients, shapes, wanted, strict=True)
    return [one(gradient, shape) if want else None for gradient, shape, want in listed]


class Lent:
    """A result that the backward pass reads again unless the caller has written into it.

    It is held as an alias outside of autograd (no cycle with the graph), with its version.
    """

    __slots__ = ("_alias", "_version")

    def __init__(self, result: torch.Tensor) -> None:
        self._alias: torch.Tensor | None = result.detach()
        self._version = result._version

    def take(self) -> torch.Tensor | None:
        """Return the result, or None if it was changed; it is released unless the graph is kept."""
        found = self._alias
        if not keeps_graph():
            self._alias = None
        return None if found is None or found._version != self._version else found


class Unsaved:
    """Arguments that a backward pass reads only if it is repeated or differentiated itself.

    They are not saved by autograd, because a change of a saved tensor makes every backward pass raise.
    """

    __slots__ = ("_tensors", "_versions")

    def __init__(self, *tensors: torch.Tensor | None) -> None:
        self._tensors = tensors
        self._versions = [version(t) for t in tensors]

    def unchanged(self) -> tuple[torch.Tensor | None, ...]:
        """Return the arguments; raises torch's RuntimeError if one was changed in place."""
        if [version(t) for t in self._tensors] != self._versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation"
            )
        return self._tensors


def version(tensor: torch.Tensor | None) -> int:
    """Return the version of a tensor; tensors of inference mode have none."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


class _Computed(torch.autograd.Function):
    """A value that is computed already, with its first derivatives or what computes them."""

    @staticmethod
    def forward(ctx, found, plain, unsaved, *tensors):  # type: ignore[no-untyped-def]
        value, ctx.gradients = found  # in one object, since autograd makes views of tensors that pass through
        ctx.plain, ctx.unsaved, ctx.shapes = plain, Unsaved(*tensors[:unsaved]), [t.shape for t in tensors]
        ctx.save_for_backward(*tensors[unsaved:])
        return value if isinstance(value, torch.Tensor) else tensors[0].new_tensor(value)

    @staticmethod
    @spent_by_backward
    @each_cotangent
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        wanted, saved = ctx.needs_input_grad[3:], ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, None, *plain_gradients(ctx.plain, (*ctx.unsaved.unchanged(), *saved), wanted, grad)
        gradients = ctx.gradients(wanted) if callable(ctx.gradients) else ctx.gradients
        return None, None, None, *times(gradients, grad, ctx.shapes, wanted)


def computed(
    value: float | torch.Tensor,
    gradients: Sequence[torch.Tensor] | Callable[[Sequence[bool]], Sequence[torch.Tensor | None]],
    plain: Callable[..., torch.Tensor],
    *tensors: torch.Tensor,
    saved: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Return a value as a function of tensors whose gradients are there; second derivatives go through `plain`.

    In place of gradients, a function may return those that are wanted in the backward pass. The `saved` come last.
    Autograd saves those, so that every backward pass raises where one was changed in place.
    """
    of = (value, gradients), plain, len(tensors), *tensors, *saved
    found: torch.Tensor = _Computed.apply(*of)  # type: ignore[no-untyped-call]
    return found
