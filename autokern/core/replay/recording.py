"""A computation of small tensors, recorded once below autograd and replayed with other numbers in the same memory.

`Recorder` is a dispatch mode: it sees every operation that torch runs, those of backward passes included. Tensors that
depend on no input are constants, views need no work, and all other operations become calls that write to the same
memory again. A replay gives the bits of the recorded code, except for some derivatives (`prod`), which torch computes
by another formula while a mode is active. A number that Python has read must be the same in a replay. Not recorded are
numbers that leave torch (``numpy()``), random draws without `seeding`, and writes that change tensors from outside.
Reads by extensions in C++ are not seen, so callers compare replays with the recorded code.
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
from torch.utils._python_dispatch import TorchDispatchMode

from autokern.core.errors import caught
from autokern.core.replay import Pairs, operations
from autokern.core.replay.effects import Leaving
from autokern.core.replay.operations import Kind, Noted, Replay, Step, UnrecordedError, apart, memory_of, tensors_in

_MOST_STEPS, _IN_CACHE, _MOST_BYTES, _MOST_OF_ALL = 20_000, 2**21, 2**26, 2**28
"""Most steps; most bytes of a recording whose tensors share no memory, of any, and of all of a process."""
_living: list[tuple[weakref.ref[Any], int]] = []  # owners of recordings, with bytes, oldest first
_LIFT = torch.ops.aten.lift_fresh.default
_READ, _BATCH_NORM = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.native_batch_norm.default
_TORCHS = "aten", "prim", "prims", "profiler"  # namespaces of operations
_FRAMES = 8  # most frames between the record of an operation and the function that called it


def _running(func: Any, args: Any) -> list[torch.Tensor]:
    """Return the running statistics that a batch norm updates, which its schema does not state."""
    return tensors_in(args[3:5]) if func is _BATCH_NORM and args[5] else []


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the computations from its inputs within the block; these run as without it.

    The inputs are leaves that own their memory; a replay reads their contents at its time. Unless `seeding` is None, a
    replay draws random numbers from torch's default generator. The code object `seeding` draws seeds, which may change.
    """

    def __init__(self, *inputs: torch.Tensor, seeding: CodeType | bool | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seeding, self._seeds = seeding, set[int]()  # memory of drawn seeds
        self.draws, self.reads = False, 0  # `reads` counts the numbers that Python has read
        self.drawn: dict[torch.Generator, torch.Tensor] = {}
        """The generators of the program from which the computation drew, and their earlier states."""
        self._inputs = {memory_of(t) for t in inputs}
        self.copies = operations.Copies([t for t in inputs if isinstance(t, torch.nn.Parameter)])
        self._varying = set(self._inputs)
        self._made: dict[int, Any] = dict.fromkeys(self._inputs)  # with a tensor that keeps it alive
        self._constants: dict[int, tuple[torch.Tensor, int]] = {}
        self._empty: set[int] = set()  # memory that no operation has written yet
        self._outside: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # with earlier contents and version
        self._restored: list[Step] = []
        self._begun: set[int] = set()  # memory whose contents each replay restores first
        self._steps: list[Noted] = []
        self._bytes, self._middle, self._reason = 0, 0, ""
        self._leaving: Any = Leaving(self)

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
        """Record the reason why no replay is possible; the computation itself goes on."""
        self._reason = self._reason or reason

    def undo(self) -> None:
        """Undo what the computation has written to tensors from outside."""
        for tensor, before, version in reversed(self._outside):
            tensor.data.copy_(before)
            if version >= 0:
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))

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

    def leave(self, values: Any) -> None:
        """Refuse a recording whose numbers leave torch by these values, unless they depend on no input."""
        if not self._varying.isdisjoint(map(memory_of, tensors_in(values))):
            self.fail("numbers leave torch")

    def has_read(self, tensor: torch.Tensor) -> bool:
        """Whether the computation has read the storage of a tensor that it did not make."""
        return memory_of(tensor) in self._constants

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether the computation has made the storage of a tensor."""
        return memory_of(tensor) in self._made.keys() - self._inputs

    def mark(self) -> None:
        """Begin the second of the `parts`."""
        self._middle = len(self._steps)

    def replay(self, *results: torch.Tensor) -> Replay:
        """Return a Replay that computes the results again, in their memory; UnrecordedError if there is none."""
        return self.parts((), *results)[1]

    def parts(self, first: Iterable[torch.Tensor], *results: torch.Tensor) -> tuple[Replay, Replay]:
        """Return a Replay that computes `first`, up to the `mark`, and one that then computes the results."""
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
        storages = self.copies.memory | (operations.shared(every, kept) if self._bytes > _IN_CACHE else {})
        steps = [step for step, _, _ in every]
        steps = operations.moved(steps, storages) if storages else steps
        begin, constants = self._restored, [one for one in self._constants.values() if one[1] >= 0]
        if not self._middle:
            return Replay((), ()), Replay([*begin, *steps], constants)
        return Replay([*begin, *steps[: len(sooner)]], constants), Replay(steps[len(sooner) :], constants)

    def _needed(self, memories: set[int], steps: Sequence[Noted]) -> list[Noted]:
        """Return the steps that are checks or write to `memories`; the storages that they read are added to these."""
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
            others = self.noticed(self._saved, func, args, kwargs, kind) if kind.written or func is _BATCH_NORM else []
            if self._reason or kind.view:
                out = func(*args, **kwargs)
                if func is _LIFT and out.untyped_storage().resizable():  # `torch.tensor` has just made it
                    self.noticed(lambda: self._made.setdefault(memory_of(out), out))
                return out
            noted = self.noticed(self._before, func, args, kwargs, kind)
            out = func(*args, **kwargs)
            if noted is not None:
                self.noticed(self._after, func, args, kwargs, kind, out, *noted, others)
            return out

    def noticed(self, note: Callable[..., Any], *call: Any) -> Any:
        """Call `note` for an operation; if it fails, the recording is refused and the computation goes on."""
        try:
            return note(*call)
        except caught(Exception) as error:
            self.fail(str(error) or repr(error))
            return None

    def _saved(self, func: Any, args: Any, kwargs: Any, kind: Kind) -> Pairs:
        """Return the tensors from outside that an operation writes, with copies."""
        written = [*operations.written(kind, args, kwargs), *_running(func, args)]
        found = [(t, t.clone()) for t in written if (at := memory_of(t)) not in self._made or at in self._inputs]
        self._outside += [(t, before, -1 if t.is_inference() else t._version) for t, before in found]
        return found

    def _before(self, func: Any, args: Any, kwargs: Any, kind: Kind) -> tuple[dict[int, torch.Tensor], bool]:
        """Return what an operation reads, and whether its result varies."""
        memories = self._read(tensors_in((*args, *kwargs.values())))
        varies = kind.seeded or (kind.reads and not self._varying.isdisjoint(memories))
        if func.namespace not in _TORCHS:
            raise UnrecordedError(f"{func}, whose code may do more than compute")
        if kind.seeded and (self._seeding is None or kwargs.get("generator") is not None):
            raise UnrecordedError(f"{func} draws random numbers")
        if _running(func, args):
            raise UnrecordedError(f"{func} updates running statistics")
        if torch.Tag.inplace_view in func.tags and not memories.keys() <= self._made.keys() - self._inputs:
            raise UnrecordedError(f"{func} changes a tensor of others")
        self.draws, self.reads = self.draws or kind.seeded, self.reads + (func is _READ)
        if func is _READ and memories.keys() <= self._seeds:
            return memories, False
        for tensor in operations.written(kind, args, kwargs) if varies else ():
            memory = memory_of(tensor)
            if memory in self._made and memory not in self._varying:  # replays begin with its present contents
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._restored.append(functools.partial(whole.copy_, whole.clone()))
                self._begun.add(memory)
                self._varying.add(memory)
        return memories, varies

    def _read(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return tensors by the address of their storage; those from outside are noted as constants."""
        memories = {memory_of(t): t for t in tensors}
        for memory in memories.keys() - self._made.keys() - self._constants.keys():
            self._constants[memory] = (one := memories[memory]), 0 if one.is_inference() else one._version
        return memories

    def _after(
        self, func: Any, args: Any, kwargs: Any, kind: Kind, out: Any, memories: Any, varies: bool, others: Pairs
    ) -> None:
        """Note an operation and its results."""
        step_args, step_kwargs = tuple(map(apart, args)), {name: apart(value) for name, value in kwargs.items()}
        if others:  # an operation that leaves outside tensors as they are: replays repeat it for parameters, else check
            changed = {memory_of(t) for t, _ in others}
            parameters = changed <= self.copies.by.keys()
            stays = not varies and all(torch.equal(*pair) for pair in others)
            if not (operations.stays(func, kind, step_args, step_kwargs) if parameters else stays):
                raise UnrecordedError(f"{func} writes to memory of others")
            if parameters:  # replays write its copy
                self._steps.append((functools.partial(func, *step_args, **step_kwargs), set(memories), set()))
                wholes = ((memory, self.copies.by[memory]) for memory in changed)
                self._steps += [(functools.partial(of.copy_, of.detach()), {memory}, set()) for memory, of in wholes]
            for tensor, before in [] if parameters else others:  # compared instead of version counters
                self._constants[memory_of(tensor)] = tensor, -1
                equal = functools.partial(torch.equal, tensor.detach(), before)
                self._steps.append((functools.partial(operations.same, equal, True), {memory_of(tensor)}, set()))
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
            step = operations.step_of(func, kind, step_args, step_kwargs, fresh, out)
            self._steps.append((step, set(memories), writes))
            if kind.seeded and any(f.f_code is self._seeding for f, _ in islice(traceback.walk_stack(None), _FRAMES)):
                self._seeds |= writes
            if kind.shaped or kind.seeded:  # a check keeps the step: Python may have read the shape, draws are repeated
                self._steps.append((lambda: None, writes, set()))

    def _check(self, func: Any, fresh: Iterable[torch.Tensor]) -> None:
        """Refuse results that cannot be written again, and recordings that are too large."""
        for tensor in fresh:
            self._bytes += tensor.nbytes
            if tensor.is_complex() or tensor._is_zerotensor():
                raise UnrecordedError(f"{func} returns a tensor of another kind")
        if self._bytes > _MOST_BYTES or len(self._steps) > _MOST_STEPS:
            raise UnrecordedError("a large computation")

    def limit(self, owner: Any) -> None:
        """Let the oldest owners forget their recordings while all recordings exceed the limit of memory."""
        _living[:] = [(ref, n) for ref, n in _living if (found := ref()) not in (None, owner) and found.serves]
        _living.append((weakref.ref(owner), self._bytes))
        while sum(n for _, n in _living) > _MOST_OF_ALL:
            if (oldest := _living.pop(0)[0]()) is not None:
                oldest.forget()
