"""Helpers of autograd functions: cotangents batched by vmap, tensors that the caller may overwrite, double backward.

Closed-form backward passes work in place and have no batching rules. Under vmap (``is_grads_batched=True``, or
`torch.vmap` over `torch.autograd.grad`) they run once for each cotangent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad

SPENT = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)
"""torch's message for a second backward pass through a freed graph."""

COMPUTED = "_ComputedBackward"  # the name of the graph node of a `computed` value

_torch: Any = torch  # vmap's internals have no type stubs
_functorch: Any = torch._C._functorch
_is_old: Callable[[Any], bool] = _functorch.is_legacy_batchedtensor
_is_new: Callable[[Any], bool] = _functorch.is_batchedtensor
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the running backward pass retains the graph."""


def each_cotangent(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backward pass: under vmap it runs once for each cotangent; symbolic zeros become ordinary tensors."""

    @functools.wraps(backward)
    def served(ctx: Any, *grads: Any) -> Any:
        for grad in grads:
            if grad is not None and (_is_new(grad) or _is_old(grad)):
                return _outside(served, ctx, grads, _is_old(grad))
        return backward(ctx, *(g if g is None or not g._is_zerotensor() else g.clone() for g in grads))

    return served


def _outside(served: Callable[..., Any], ctx: Any, grads: tuple[Any, ...], old: bool) -> Any:
    """Run a backward pass for each cotangent outside of the innermost vmap (`old`: a legacy one); batch the results."""
    if old:
        parts = [_torch._remove_batch_dim(g, 1, 1, 0).unbind() if g is not None and _is_old(g) else g for g in grads]
        return tuple(g if g is None else _torch._add_batch_dim(g, 0, 1) for g in _together(served, ctx, parts))
    level, parts = _functorch.maybe_current_level(), list(grads)
    for place, g in enumerate(grads):
        if g is not None and _is_new(g) and _functorch.maybe_get_level(g) == level:
            parts[place] = _functorch.get_unwrapped(g).movedim(_functorch.maybe_get_bdim(g), 0).unbind()
    with temporarily_pop_interpreter_stack():
        found = _together(served, ctx, parts)
    return tuple(g if g is None else _functorch._add_batch_dim(g, 0, level) for g in found)


def _together(served: Callable[..., Any], ctx: Any, parts: list[Any]) -> tuple[Any, ...]:
    """Run a backward pass for each element of the cotangents that are tuples; stack the results."""
    count = max((len(p) for p in parts if isinstance(p, tuple)), default=1)
    each = [served(ctx, *(p[i] if isinstance(p, tuple) else p for p in parts)) for i in range(count)]
    columns = zip(*(found if isinstance(found, tuple) else (found,) for found in each), strict=True)
    return tuple(None if column[0] is None else torch.stack(column) for column in columns)


def has_duals() -> bool:
    """Whether forward-mode AD is active: tensors may have tangents, which NumPy arrays would lose."""
    return forward_ad._current_level >= 0


def readable(*tensors: torch.Tensor) -> bool:
    """Whether NumPy can read these CPU tensors: no tangents, symbolic zeros or inference tensors."""
    return not has_duals() and not any(t._is_zerotensor() or t.is_inference() for t in tensors)


def plain_gradients(
    function: Callable[..., torch.Tensor | Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor | None],
    wanted: Sequence[bool],
    cotangents: torch.Tensor | Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Return autograd's gradients of a function with respect to the wanted inputs, differentiable in grad mode."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # a view for each input: one tensor may occur twice, or depend on another
        own = [t.view_as(t) if want and t is not None else t for t, want in zip(inputs, wanted, strict=True)]
        sources = [tensor for tensor, want in zip(own, wanted, strict=True) if want and tensor is not None]
        outs = function(*own)
        both: Any = [(outs, cotangents)] if isinstance(outs, torch.Tensor) else zip(outs, cotangents, strict=True)
        whole: Any = sum((out * cotangent).sum() for out, cotangent in both)  # `grad_outputs` would import sympy
    found = iter(torch.autograd.grad(whole, sources, create_graph=graph, allow_unused=True))
    return [next(found) if want else None for want in wanted]


def times(
    gradients: Sequence[Any], cotangent: torch.Tensor, shapes: Sequence[torch.Size], wanted: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Multiply the wanted gradients by the cotangent of the value, summed to the shapes of the inputs."""
    if not cotangent.dim():
        found = iter(torch._foreach_mul([t for t, want in zip(gradients, wanted, strict=True) if want], cotangent))
        return [next(found) if want else None for want in wanted]

    def one(gradient: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        each = cotangent.view(*cotangent.shape, *(1,) * (gradient.dim() - cotangent.dim()))
        return (gradient * each).sum_to_size(shape)

    listed = zip(gradients, shapes, wanted, strict=True)
    return [one(gradient, shape) if want else None for gradient, shape, want in listed]


class Lent:
    """A result that the backward pass reads again unless it was changed: a detached alias, with its version."""

    def __init__(self, result: torch.Tensor) -> None:
        self._alias: torch.Tensor | None = result.detach()
        self._version = result._version

    def take(self) -> torch.Tensor | None:
        """Return the result, or None if it was changed or released; release it unless the graph is retained."""
        found = self._alias
        if not keeps_graph():
            self._alias = None
        return None if found is None or found._version != self._version else found


class Unsaved:
    """Arguments for repeated or differentiated backward passes; after a change of saved ones, any pass would raise."""

    def __init__(self, *tensors: torch.Tensor | None) -> None:
        self._tensors = tensors
        self._versions = [version(t) for t in tensors]

    def unchanged(self) -> tuple[torch.Tensor | None, ...]:
        """Return the arguments; torch's RuntimeError if one was changed in place."""
        if [version(t) for t in self._tensors] != self._versions:
            told = "one of the variables needed for gradient computation has been modified by an inplace operation"
            raise RuntimeError(told)
        return self._tensors


def version(tensor: torch.Tensor | None) -> int:
    """Return the version counter of a tensor; 0 for None and for inference tensors, which have no counter."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


class _Computed(torch.autograd.Function):
    """A value computed beforehand, with its first derivatives or a function that computes them."""

    @staticmethod
    def forward(ctx, found, plain, unsaved, *tensors):  # type: ignore[no-untyped-def]
        value, ctx.gradients = found  # one tuple: autograd would return a view of a tensor argument
        ctx.plain, ctx.unsaved, ctx.shapes = plain, Unsaved(*tensors[:unsaved]), [t.shape for t in tensors]
        ctx.save_for_backward(*tensors[unsaved:])
        return value if isinstance(value, torch.Tensor) else tensors[0].new_tensor(value)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        kept, found = keeps_graph(), _pulled_back(ctx, grad)
        if not kept:  # never written back: another thread may have released them meanwhile
            ctx.gradients = None
        return found


@each_cotangent
def _pulled_back(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    gradients = ctx.gradients  # read once: another thread may differentiate the same graph
    if gradients is None:
        raise RuntimeError(SPENT)
    wanted, saved = ctx.needs_input_grad[3:], ctx.saved_tensors
    if torch.is_grad_enabled():
        return None, None, None, *plain_gradients(ctx.plain, (*ctx.unsaved.unchanged(), *saved), wanted, grad)
    found = gradients(wanted) if callable(gradients) else gradients
    return None, None, None, *times(found, grad, ctx.shapes, wanted)


def computed(
    value: float | torch.Tensor,
    gradients: Sequence[torch.Tensor] | Callable[[Sequence[bool]], Sequence[torch.Tensor | None]],
    plain: Callable[..., torch.Tensor],
    *tensors: torch.Tensor,
    saved: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Return a known value as a differentiable function of `tensors`, then `saved`; double backward runs `plain`.

    `gradients` may be a function, which the backward pass calls with the wanted flags. Autograd saves only `saved`:
    every backward pass raises if one of these was changed in place.
    """
    of = (value, gradients), plain, len(tensors), *tensors, *saved
    return cast("torch.Tensor", _Computed.apply(*of))  # type: ignore[no-untyped-call]


def computed_share(value: Any, most: int = 8) -> float:
    """Return 1 if a value comes from a `computed` node in few steps, 0.9 if the node's graph is large, else 0."""
    node = getattr(value, "grad_fn", None)
    for _ in range(4):
        if node is None or type(node).__name__ == COMPUTED:
            break
        node = next((one for one, _ in node.next_functions), None)
    else:
        return 0.0
    seen, waiting = set[Any](), [] if node is None else [node]
    while waiting and len(seen) <= most:
        seen.add(one := waiting.pop())
        below = (node for node, _ in one.next_functions)
        waiting += [node for node in below if node is not None and node.next_functions and node not in seen]
    return 0.0 if node is None else 0.9 if waiting or len(seen) > most else 1.0
