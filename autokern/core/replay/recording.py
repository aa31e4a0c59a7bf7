"""A computation of small tensors, recorded once below autograd and replayed with other numbers in the same memory.

`Recorder` is a dispatch mode: it sees every operation that torch runs, those of backward passes included. What depends
on no input is a constant. Views need no work, since all tensors of a recording keep their memory. The rest becomes a
list of calls that write where they wrote, as CUDA graphs do, without modules and autograd nodes between them. A replay
computes bit for bit what the recorded code would, but for some derivatives (`prod`) that torch computes otherwise
while it is recorded.

A number that Python has read, such as a flag of LAPACK, must be the same in a replay. What leaves torch
(``numpy()``) cannot be recorded, nor random draws without the recorder's consent, nor operations that write to memory
of others, unless writing once more would change nothing, as where norms are limited.
What an extension in C++ reads is not seen: who records compares replays with the recorded code at other inputs.
"""

from __future__ import annotations

import functools
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autokern.core.errors import caught
from autokern.core.replay import Pairs, operations
from autokern.core.replay.operations import Kind, Noted, Replay, Step, UnrecordedError, apart, memory_of, tensors_in

_IN_CACHE, _MOST_BYTES, _MOST_OF_ALL = 2**21, 2**26, 2**28
"""Most bytes of tensors that need not share memory, of a recording, and of all recordings of a process."""
_living: list[tuple[weakref.ref[Any], int]] = []  # what has a recording, with the bytes of it, oldest first
_MOST_STEPS = 20_000
_READ = torch.ops.aten._local_scalar_dense.default
_BATCH_NORM = torch.ops.aten.native_batch_norm.default
_FRAMES = 8  # from the record of an operation to the function that called it, at most
_LEAVING = frozenset(("__array__", "__dlpack__", "data_ptr", "numpy", "storage", "tolist", "untyped_storage"))


class _Leaving(TorchFunctionMode):
    """Notices where tensors of a recording are read by others."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and getattr(func, "__name__", "") in _LEAVING:
            with torch._C.DisableTorchFunction():
                self._recorder.noticed(self._recorder.leaves, args[0])
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is computed from some tensors while it is entered; the computation runs as without it.

    The inputs are leaves that own their memory. A replay reads whatever they contain then. Unless `seeding` is None, it
    draws random numbers from torch's own generator, but does not use those that this code draws as a seed.
    """

    def __init__(self, *inputs: torch.Tensor, seeding: CodeType | bool | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seeding, self._seeds = seeding, set[int]()  # memory of drawn seeds
        self.draws = False
        self.drawn: dict[torch.Generator, torch.Tensor] = {}
        """The program's own generators that the computation drew from, and their states before."""
        self._inputs = {memory_of(t) for t in inputs}
        self.copies = operations.Copies([t for t in inputs if isinstance(t, torch.nn.Parameter)])
        self._varying = set(self._inputs)
        self._made: dict[int, Any] = dict.fromkeys(self._inputs)  # with a tensor that keeps the memory
        self._constants: dict[int, tuple[torch.Tensor, int]] = {}
        self._empty: set[int] = set()  # memory that no operation has written yet
        self._restored: list[Step] = []
        self._begun: set[int] = set()  # memory with contents that are restored
        self._steps: list[Noted] = []
        self._bytes, self._reason = 0, ""
        self._middle = 0
        self._leaving: Any = _Leaving(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that torch adds otherwise imports its compiler, which takes seconds

    def __enter__(self) -> Any:
        self._leaving.__enter__()
        try:
            return super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:  # an interrupt leaves nothing entered
            self._leaving.__exit__(None, None, None)
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            self._leaving.__exit__(None, None, None)

    def fail(self, reason: str) -> None:
        """Note why nothing can be replayed; the computation itself goes on."""
        self._reason = self._reason or reason

    def called(self, function: Callable[..., torch.Tensor], args: Any) -> torch.Tensor:
        """Run a function of an extension, which returns a new tensor and does nothing else, as one operation."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            found = function(*args)
            if not self._reason:
                self.noticed(self._whole, function, args, found)
        return found

    def _whole(self, function: Any, args: Any, found: torch.Tensor) -> None:
        memories = self._read(tensors_in(args))
        self._made[memory_of(found)] = found.detach()
        self._check(function, [found])
        if not self._varying.isdisjoint(memories):
            self._varying.add(memory_of(found))
            call = functools.partial(function, *map(apart, args))
            step = functools.partial(operations.copied, call, [found.detach()])
            self._steps.append((step, set(memories), {memory_of(found)}))

    def leaves(self, tensor: Any) -> None:
        """Note that something else reads a tensor."""
        if isinstance(tensor, torch.Tensor) and memory_of(tensor) in self._varying:
            self.fail("numbers leave torch")

    def has_read(self, tensor: torch.Tensor) -> bool:
        """Whether the computation has read memory of others in which a tensor is."""
        return memory_of(tensor) in self._constants

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether the computation has made the memory of a tensor."""
        return memory_of(tensor) in self._made.keys() - self._inputs

    def mark(self) -> None:
        """Begin the second of the `parts`."""
        self._middle = len(self._steps)

    def replay(self, *results: torch.Tensor) -> Replay:
        """Return what computes the results again, in their memory; UnrecordedError if that is not possible."""
        return self.parts((), *results)[1]

    def parts(self, first: Iterable[torch.Tensor], *results: torch.Tensor) -> tuple[Replay, Replay]:
        """Return what computes `first` before the `mark`, and what computes the results after it."""
        if not self._reason and self._varying.isdisjoint(map(memory_of, results)):
            self.fail("no result depends on an input")
        if self._reason:
            raise UnrecordedError(self._reason)
        memories = set(map(memory_of, results))
        kept = memories | set(map(memory_of, first)) | self._inputs | self._constants.keys() | self._begun
        later = self._needed(memories, self._steps[self._middle :])
        memories.update(map(memory_of, first))
        sooner = self._needed(memories, self._steps[: self._middle])
        every = [*sooner, *later]
        steps = operations.share(every, kept) if self._bytes > _IN_CACHE else [step for step, _, _ in every]
        steps = operations.moved(steps, self.copies.memory) if self.copies.memory else steps
        begin, constants = self._restored, [one for one in self._constants.values() if one[1] >= 0]
        if not self._middle:
            return Replay((), ()), Replay([*begin, *steps], constants)
        return Replay([*begin, *steps[: len(sooner)]], constants), Replay(steps[len(sooner) :], constants)

    def _needed(self, memories: set[int], steps: Sequence[Noted]) -> list[Noted]:
        """Return the steps that check or write one of these memories, to which what they read is added."""
        found = []
        for noted in reversed(steps):
            _, reads, writes = noted
            if not writes or not writes.isdisjoint(memories):
                found.append(noted)
                memories |= reads
        return found[::-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (generator := kwargs.get("generator")) is not None and generator not in self.drawn:
            self.drawn[generator] = generator.get_state()
        kind = operations.kind_of(func)
        with torch._C.DisableTorchFunction():
            if self._reason or kind.view:
                return func(*args, **kwargs)
            noted = self.noticed(self._before, func, args, kwargs, kind)
            out = func(*args, **kwargs)
            if noted is not None:
                self.noticed(self._after, func, args, kwargs, kind, out, *noted)
            return out

    def noticed(self, note: Callable[..., Any], *call: Any) -> Any:
        """Note an operation, or why that is not possible, which is no matter of the computation."""
        try:
            return note(*call)
        except caught(Exception) as error:
            self.fail(str(error) or repr(error))
            return None

    def _before(self, func: Any, args: Any, kwargs: Any, kind: Kind) -> tuple[dict[int, torch.Tensor], bool, Pairs]:
        """Note what an operation reads; return whether its result varies, and what of others it writes, with copies."""
        memories = self._read(tensors_in((*args, *kwargs.values())))
        varies = kind.seeded or (kind.reads and not self._varying.isdisjoint(memories))
        if kind.seeded and (self._seeding is None or kwargs.get("generator") is not None):
            raise UnrecordedError(f"{func} draws random numbers")
        if func is _BATCH_NORM and args[3] is not None and args[5]:  # its schema does not say so
            raise UnrecordedError(f"{func} updates running statistics")
        self.draws = self.draws or kind.seeded
        if func is _READ and memories.keys() <= self._seeds:
            return memories, False, []
        return memories, varies, self._writes(operations.written(kind, args, kwargs), varies)

    def _read(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the memory of tensors, after noting what is of others."""
        memories = {memory_of(t): t for t in tensors}
        for memory, tensor in memories.items():
            if memory not in self._made and memory not in self._constants:
                self._constants[memory] = tensor, 0 if tensor.is_inference() else tensor._version
        return memories

    def _writes(self, tensors: Iterable[torch.Tensor], varies: bool) -> Pairs:
        others = []
        for tensor in tensors:
            memory = memory_of(tensor)
            if memory not in self._made or memory in self._inputs:
                others.append((tensor, tensor.clone()))
            elif varies and memory not in self._varying:  # a replay begins with what is there now
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._restored.append(functools.partial(whole.copy_, whole.clone()))
                self._begun.add(memory)
                self._varying.add(memory)
        return others

    def _after(
        self, func: Any, args: Any, kwargs: Any, kind: Kind, out: Any, memories: Any, varies: bool, others: Pairs
    ) -> None:
        """Note an operation and its results."""
        if others:
            self._rewritten(func, args, kwargs, kind, memories, varies, others)
            return
        if kind.written:
            self._empty.difference_update(memories)
        made = [(at, t.detach()) for t in tensors_in((out,)) if (at := memory_of(t)) not in memories]
        fresh = [t for _, t in made]
        if fresh and kind.reads and not self._empty.isdisjoint(memories):
            raise UnrecordedError(f"{func} reads what was computed outside of torch")
        if kind.empty:
            self._empty.update(at for at, t in made if t.numel())
        self._made.update(made)
        self._check(func, fresh)
        if varies and (fresh or kind.written or not isinstance(out, (torch.Tensor, tuple, list))):
            writes = {*map(memory_of, operations.written(kind, args, kwargs)), *(at for at, _ in made)}
            self._varying |= writes
            args, kwargs = map(apart, args), {name: apart(value) for name, value in kwargs.items()}
            self._steps.append((operations.step_of(func, kind, tuple(args), kwargs, fresh, out), set(memories), writes))
            if kind.seeded and any(f.f_code is self._seeding for f, _ in islice(traceback.walk_stack(None), _FRAMES)):
                self._seeds |= writes
            if kind.shaped or kind.seeded:  # the step checks the shape, which Python may have read, or draws
                self._steps.append((_nothing, writes, set()))

    def _rewritten(
        self, func: Any, args: Any, kwargs: Any, kind: Kind, reads: Any, varies: bool, others: Pairs
    ) -> None:
        """Note an operation that writes to memory of others: to parameters as a replay does, else what is there."""
        args, kwargs = tuple(map(apart, args)), {name: apart(value) for name, value in kwargs.items()}
        memories = {memory_of(t) for t, _ in others}
        parameters = memories <= self.copies.by.keys()
        stays = not varies and all(torch.equal(*pair) for pair in others)
        if not (operations.stays(func, kind, args, kwargs) if parameters else stays):
            raise UnrecordedError(f"{func} writes to memory of others")
        if parameters:
            self._steps.append((functools.partial(func, *args, **kwargs), set(reads), set()))
            for memory in memories:  # a copy of the parameter is written
                whole = self.copies.by[memory]
                self._steps.append((functools.partial(whole.copy_, whole.detach()), {memory}, set()))
        for tensor, before in [] if parameters else others:  # numbers count from now on, not versions
            self._constants[memory_of(tensor)] = tensor, -1
            step = functools.partial(operations.are_as_before, tensor.detach(), before)
            self._steps.append((step, {memory_of(tensor)}, set()))

    def _check(self, func: Any, fresh: Iterable[torch.Tensor]) -> None:
        """Refuse results that cannot be written again, and too many."""
        for tensor in fresh:
            self._bytes += tensor.nbytes
            if tensor.is_complex() or tensor._is_zerotensor():
                raise UnrecordedError(f"{func} returns a tensor of another kind")
        if self._bytes > _MOST_BYTES or len(self._steps) > _MOST_STEPS:
            raise UnrecordedError("a large computation")

    def limit(self, owner: Any) -> None:
        """Let the oldest owners of recordings forget theirs where all take more memory than is worth it."""
        _living[:] = [(ref, n) for ref, n in _living if (found := ref()) not in (None, owner) and found.serves]
        _living.append((weakref.ref(owner), self._bytes))
        while sum(n for _, n in _living) > _MOST_OF_ALL:
            if (oldest := _living.pop(0)[0]()) is not None:
                oldest.forget()


def _nothing() -> None:
    """Do nothing, as a step that needs others."""
