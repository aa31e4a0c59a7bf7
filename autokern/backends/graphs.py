"""Recorded steps: what a function launches on a GPU is recorded once, as a CUDA graph, and launched again as one.

A small training step is sixty launches of a few microseconds each, and the processor needs longer to make them than the
GPU to run them. What is recorded must read nothing back to the host and have one shape for ever. Inputs are copied
into the memory that the recording knows, and the result out of it, so that neither is seen to be used again. A
recording belongs to one thread and one stream: nothing else ever runs it.

Recording touches state of the whole process, so it is only done where the user allows it (``AUTOKERN_GRAPHS=on``), no
other Python thread could launch anything meanwhile, and no earlier recording has failed; where it cannot be done the
function simply runs.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch

__all__ = ["allow", "forget", "recorded", "unavailable"]

Step = Callable[..., torch.Tensor]
_log = logging.getLogger("autokern")
_KEPT = 8
"""Recordings that a thread keeps."""
_FRESH = 64
"""Calls within which a recording counts as in use, and makes no room for another."""
_WARM = 3
"""Runs ahead of a recording, in which libraries make their handles and plans."""
_own = threading.local()
_busy = threading.Lock()  # a capture stands no launch beside it
_allowed = False
_failed = ""


class _Recording:
    """One recorded step: the memory of its inputs and of its result, and what runs it again."""

    __slots__ = ("_inputs", "_replay", "_result", "used")

    def __init__(self, step: Step, inputs: Sequence[torch.Tensor]) -> None:
        self._inputs = [t.detach().clone() for t in inputs]
        self._result, self._replay = _capture(lambda: step(*self._inputs), inputs[0].device)
        self.used = 0

    def __call__(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        with _busy:
            torch._foreach_copy_(self._inputs, [t.detach() for t in inputs])
            self._replay()
            return self._result.clone()


class _Kept:
    """The recordings of one thread, those used last at the end, and how many calls there were."""

    def __init__(self) -> None:
        self.recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self.calls = 0


def allow(yes: bool) -> None:
    """Allow or forbid recordings; ``AUTOKERN_GRAPHS=on`` allows them."""
    global _allowed
    _allowed = yes


def unavailable(device: str) -> str | None:
    """Return why nothing can be recorded on a kind of device, or None if it can."""
    if device != "cuda":
        return "only what a CUDA device runs can be recorded"
    if not _allowed:
        return "recording steps is off: AUTOKERN_GRAPHS=on allows it"
    return f"a recording failed in this process: {_failed}" if _failed else None


def recorded(key: Hashable, step: Step, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``step(*inputs)``, recorded when the key is new to this thread and stream, and run again ever after.

    Parameters
    ----------
    key : hashable
        All that determines what the step does, apart from shapes, dtypes and device of the inputs, and from torch's
        settings of precision.
    step : callable
        Takes tensors and returns one; it must not read any back to the host, nor draw random numbers.
    inputs : sequence of Tensor
        On one CUDA device. No gradients flow through.

    Returns
    -------
    Tensor
        The caller's own.
    """
    global _failed
    if not hasattr(_own, "kept"):
        _own.kept = _Kept()
    kept: _Kept = _own.kept
    kept.calls += 1
    device = inputs[0].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    precision = torch.backends.cuda.matmul.fp32_precision
    whole = (key, device, stream, precision, tuple((t.shape, t.dtype) for t in inputs))
    with torch.autocast(device.type, enabled=False):
        found = kept.recordings.get(whole)
        if found is None:
            if _failed or threading.active_count() > 1 or not _is_room(kept):
                return step(*inputs)
            try:
                found = kept.recordings[whole] = _Recording(step, inputs)
            except Exception as error:
                forget()
                _failed = f"{type(error).__name__}: {error}"
                _log.warning("no more steps are recorded in this process: %s", _failed)
                raise
        kept.recordings.move_to_end(whole)
        found.used = kept.calls
        return found(inputs)


def _is_room(kept: _Kept) -> bool:
    """Whether one more recording may be made: in place of one that is no longer in use, if there are enough."""
    if len(kept.recordings) < _KEPT:
        return True
    oldest = next(iter(kept.recordings))
    if kept.calls - kept.recordings[oldest].used < _FRESH:
        return False
    del kept.recordings[oldest]
    return True


def forget() -> None:
    """Let go of all recordings of this thread, and of their memory."""
    _own.__dict__.clear()


def _capture(run: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, Callable[[], None]]:
    """Record what a function launches; return the memory of its result, and what launches it all again.

    The workspace of cuBLAS is part of a recording: it must lie in its own memory, so what others left is dropped
    before, and what it left afterwards.
    """
    with torch.cuda.device(device), _busy:
        here = torch.cuda.current_stream()
        aside = torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(here), warnings.catch_warnings():  # whatever happens, the caller's stream comes back
            warnings.filterwarnings("error", message=".*CUDA Graph is empty.*")
            with torch.cuda.stream(aside):
                for _ in range(_WARM):
                    run()
            here.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            torch._C._cuda_clearCublasWorkspaces()
            try:
                with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                    result = run()
            finally:
                torch._C._cuda_clearCublasWorkspaces()
    return result, graph.replay
