"""Torch's operations: what a schema says of an operation, and the overload that writes its results to given tensors."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

__all__ = ["Kind", "kind_of"]

_METADATA = frozenset(
    f"aten::{name}"
    for name in ("ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full", "new_empty",
                 "new_empty_strided")
)  # fmt: skip
"""Operations that read no value of their tensors."""
_QUICK = {
    f"{name}.{overload}": getattr(torch, name)
    for overload, names in {
        "out": ("abs", "add", "bmm", "cat", "clamp", "div", "exp", "gather", "log", "log1p", "mm", "mul", "neg",
                "reciprocal", "sigmoid", "sign", "sqrt", "sub", "tanh"),
        "Scalar_out": ("eq", "ge", "gt", "le", "lt", "ne"),
        "IntList_out": ("sum",), "Tensor_Scalar_out": ("pow",), "self_out": ("where",),
    }.items()
    for name in names
}  # fmt: skip
"""Overloads that write to given tensors, by functions of torch which parse their arguments in half of the time."""
_FIRST = "Tensor", "List[Tensor]"


class Kind(NamedTuple):
    """What the schema of an operation says: where its written arguments are, and the overload that writes results."""

    written: tuple[int | str, ...]
    seeded: bool
    reads: bool
    empty: bool
    out: tuple[Any, list[str]] | None


@functools.cache
def kind_of(func: Any) -> Kind:
    """Return what is known of an operation."""
    schema = func._schema
    written = tuple(
        a.name if a.kwarg_only else at
        for at, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write and torch.Tag.inplace_view not in func.tags
    )
    fixed = not written and torch.Tag.dynamic_output_shape not in func.tags
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    empty = schema.name.startswith(("aten::empty", "aten::new_empty"))
    reads = schema.name not in _METADATA and torch.Tag.inplace_view not in func.tags
    return Kind(written, seeded, reads, empty, _out_variant(func) if fixed else None)


def _out_variant(func: Any) -> tuple[Any, list[str]] | None:
    """Return the function that writes an operation's results to given tensors, and the names of those."""
    wanted = _signature(func)
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        outs = [a.name for a in overload._schema.arguments if a.is_out]
        if outs and _signature(overload) == wanted:
            quick = _QUICK.get(str(overload).removeprefix("aten.")) if wanted[0][1] in _FIRST else None
            return quick or overload._op, outs
    return None


def _signature(func: Any) -> list[tuple[str, str]]:
    """Return names and types of an operation's arguments but those that it only writes."""
    return [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
