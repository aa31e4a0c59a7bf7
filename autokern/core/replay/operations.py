"""Operations of torch: their schemas, the overloads that write to given tensors, and replays of many operations.

Results of a large recording that are needed at different times share memory, so that a replay stays in the cache.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_METADATA = frozenset(
    f"aten::{name}"
    for name in ("ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full", "new_empty",
                 "new_empty_strided")
)  # fmt: skip
"""Operations that read shapes and dtypes of their arguments, but no values."""
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
"""Functions of torch for overloads that write to given tensors; these parse their arguments in half of the time."""
_FIRST = "Tensor", "List[Tensor]"
_TYPES = torch.Tensor, torch.nn.Parameter
Step = Callable[[], Any]
Noted = tuple[Step, set[int], set[int]]  # a step, and the addresses of the memory that it reads and that it writes


class UnrecordedError(Exception):
    """A computation cannot be recorded."""


class ChangedError(Exception):
    """A number or shape that Python read while a computation was recorded differs in a replay."""


class Kind(NamedTuple):
    """Properties of an operation by its schema: the arguments that it writes, the overload that writes results, ..."""

    written: tuple[int | str, ...]
    view: bool  # whether its results are always views of its arguments
    seeded: bool
    reads: bool
    empty: bool
    shaped: bool  # whether numbers decide the shape of its result
    out: tuple[Any, list[str]] | None  # the overload that writes results to given tensors, with these arguments' names


@functools.cache
def kind_of(func: Any) -> Kind:
    """Return the Kind of an operation."""
    schema = func._schema
    written = tuple(
        a.name if a.kwarg_only else at
        for at, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write and torch.Tag.inplace_view not in func.tags
    )
    view = func.is_view and not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    shaped = torch.Tag.dynamic_output_shape in func.tags
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    empty = schema.name.startswith(("aten::empty", "aten::new_empty"))
    reads = schema.name not in _METADATA and torch.Tag.inplace_view not in func.tags
    kind = Kind(written, view, seeded, reads, empty, shaped, None)
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    for name in () if written or shaped or seeded else func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        outs = [a.name for a in overload._schema.arguments if a.is_out]
        if outs and [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out] == wanted:
            quick = _QUICK.get(str(overload).removeprefix("aten.")) if wanted[0][1] in _FIRST else None
            return kind._replace(out=(quick or overload._op, outs))
    return kind


def written(kind: Kind, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that an operation writes."""
    return tensors_in([args[at] if type(at) is int else kwargs.get(at) for at in kind.written])


def step_of(func: Any, kind: Kind, args: Any, kwargs: Any, fresh: list[torch.Tensor], out: Any) -> Step:
    """Return the step of a replay that repeats an operation."""
    call = functools.partial(func, *args, **kwargs)
    if kind.written and not fresh:
        return call
    if not fresh:
        if out is None:
            return functools.partial(_checked, call)
        if not isinstance(out, (bool, int, float)):
            raise UnrecordedError(f"{func} returns a {type(out).__name__}")
        return functools.partial(same, call, out)
    if func._schema.name in ("aten::clone", "aten::_to_copy"):
        return functools.partial(fresh[0].copy_, args[0])
    if kind.out is None or not len(fresh) == len(kind.out[1]) == (len(out) if isinstance(out, (tuple, list)) else 1):
        return functools.partial(copied, call, tensors_in([apart(out)]))
    write, names = kind.out
    return functools.partial(write, *args, **kwargs, **dict(zip(names, fresh, strict=True)))


def copied(call: Step, into: Sequence[torch.Tensor]) -> None:
    """Compute results, and copy them to given tensors of the same shapes."""
    for target, value in zip(into, tensors_in([call()]), strict=True):
        if target.shape != value.shape:
            raise ChangedError(f"a result of shape {tuple(value.shape)} in place of {tuple(target.shape)}")
        target.copy_(value)


def _checked(call: Step) -> None:
    """Repeat a check of torch, such as of LAPACK's flag; after a ChangedError the library raises its own error."""
    try:
        call()
    except RuntimeError as error:
        raise ChangedError(str(error)) from None


def same(call: Step, value: Any) -> None:
    """Repeat a call that returns a number; ChangedError if it returns another one than before."""
    found = call()
    if found != value and not (found != found and value != value):  # noqa: PLR0124
        raise ChangedError(f"{found} in place of {value}")


def stays(func: Any, kind: Kind, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether an operation would leave the arguments that it writes unchanged."""
    copies = {at: args[at].clone() for at in kind.written if type(at) is int}
    func(*(copies.get(at, one) for at, one in enumerate(args)), **kwargs)
    return len(copies) == len(kind.written) and all(torch.equal(copy, args[at]) for at, copy in copies.items())


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; recordings keep storages alive, so that no address is reused."""
    if tensor.layout is not torch.strided or type(tensor) not in _TYPES:
        raise UnrecordedError("a tensor of another kind: sparse, or of a subclass")
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


def apart(value: Any) -> Any:
    """Return aliases of tensors, whose shapes the program cannot change in place (``squeeze_``)."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return type(value)(map(apart, value)) if type(value) in (list, tuple) else value


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among values, in lists of them and in steps."""
    found = []
    for one in values:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple)):
            found += tensors_in(one)
        elif isinstance(one, functools.partial):
            found += tensors_in((one.func, *one.args, *one.keywords.values()))
        elif isinstance(owner := getattr(one, "__self__", None), torch.Tensor):
            found.append(owner)
    return found


class Replay:
    """A recorded computation: calls that write to the tensors of the recording."""

    def __init__(self, steps: Iterable[Step], constants: Iterable[tuple[torch.Tensor, int]]) -> None:
        self._steps, self._constants = tuple(steps), tuple(constants)

    def run(self) -> None:
        """Compute the results from the inputs' contents; ChangedError after a change of a constant or a number read."""
        if any(tensor._version != version for tensor, version in self._constants):
            raise ChangedError("a tensor of the recording was written since")
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for step in self._steps:
                step()


class Copies:
    """Copies of parameters, which replays read; one that is a part of a storage, or shares it, is read in place."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.by = {memory_of(p): p for p in parameters}
        users = Counter(map(memory_of, parameters))
        whole = [p.nbytes == p.untyped_storage().nbytes() and users[memory_of(p)] == 1 for p in parameters]
        both = list(zip(parameters, whole, strict=True))
        self._all = [(p, p.shape, p.dtype, 0 if own else p.data_ptr()) for p, own in both]
        self._copied = [(p, p.detach().clone()) for p, own in both if own]
        self.memory = {memory_of(p): copy.untyped_storage() for p, copy in self._copied}

    def stay(self, memories: set[int]) -> None:
        """From now on, let `take` fail if a parameter leaves one of these storages."""
        self._all = [
            (p, shape, dtype, p.data_ptr() if memory_of(p) in memories else at) for p, shape, dtype, at in self._all
        ]

    def take(self) -> bool:
        """Copy the present values of the parameters; false if a shape, dtype, device or fixed address has changed."""
        for p, shape, dtype, at in self._all:
            if p.shape != shape or p.dtype is not dtype or not p.is_cpu or (at and p.data_ptr() != at):
                return False
        if self._copied:
            with torch.no_grad():
                torch._foreach_copy_([copy for _, copy in self._copied], [p for p, _ in self._copied])
        return True


def shared(steps: Sequence[Noted], kept: Iterable[int]) -> dict[int, torch.UntypedStorage]:
    """Return storages that tensors share, each until its last use, by address, except those at `kept` addresses."""
    tensors = [(memory_of(t), t) for step, _, _ in steps for t in tensors_in((step,))]
    at_kept, any_at = {*kept, *(at for at, t in tensors if t.is_neg())}, dict(tensors)
    last = {memory: at for at, (_, reads, writes) in enumerate(steps) for memory in reads | writes}
    free, taken = list[torch.UntypedStorage](), dict[int, torch.UntypedStorage]()
    for at, (_, reads, writes) in enumerate(steps):
        for memory in writes - at_kept - taken.keys():
            size = any_at[memory].untyped_storage().nbytes()
            fitting = next((n for n in range(len(free) - 1, -1, -1) if size <= free[n].nbytes() <= 2 * size + 64), None)
            new = torch.empty(size if fitting is None else 0, dtype=torch.uint8).untyped_storage()
            taken[memory] = new if fitting is None else free.pop(fitting)  # of about this size, freed last
        free += [taken[memory] for memory in (reads | writes) & taken.keys() if last[memory] == at]
    return taken


def moved(one: Any, to: Mapping[int, torch.UntypedStorage]) -> Any:
    """Return steps, or parts of one, with the tensors at the addresses in `to` moved there, except parameters."""
    if isinstance(one, functools.partial):
        named = {name: moved(part, to) for name, part in one.keywords.items()}
        args = [moved(part, to) for part in one.args]
        return functools.partial(moved(one.func, to), *args, **named)
    if isinstance(one, torch.Tensor):
        if type(one) is torch.nn.Parameter or (memory := to.get(memory_of(one))) is None:
            return one
        return torch.empty(0, dtype=one.dtype).set_(memory, one.storage_offset(), one.size(), one.stride())
    if type(one) in (list, tuple):
        return type(one)(moved(part, to) for part in one)
    if isinstance(owner := getattr(one, "__self__", None), torch.Tensor):
        return getattr(moved(owner, to), one.__name__)
    return one
