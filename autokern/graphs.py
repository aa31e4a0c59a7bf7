"""Recorded steps: what a function launches on a GPU is recorded once, as a CUDA graph, and launched again as one.

A small training step is sixty launches of a few microseconds each, and the processor needs longer to make them than the
GPU to run them. What is recorded must read nothing back to the host and have one shape for ever. Inputs are copied
into the memory that the recording knows, and the result out of it, so that neither is seen to be used again. A
recording belongs to one thread and one stream: nothing else ever runs it. Floor 1: imports nothing of autokern.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch

__all__ = ["forget", "recorded", "why_not"]

Step = Callable[..., torch.Tensor]
_KEPT = 8
"""Recordings that a thread keeps: those used last."""
_WARM = 3
"""Runs ahead of a recording, in which libraries make their handles and plans."""
_own = threading.local()
_capturing = threading.Lock()  # torch allows one at a time in a process


class _Recording:
    """One recorded step: the memory of its inputs and of its result, and what runs it again."""

    __slots__ = ("_inputs", "_replay", "_result")

    def __init__(self, step: Step, inputs: Sequence[torch.Tensor]) -> None:
        self._inputs = [t.detach().clone() for t in inputs]
        self._result, self._replay = _capture(lambda: step(*self._inputs), inputs[0].device)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        torch._foreach_copy_(self._inputs, [t.detach() for t in inputs])
        self._replay()
        return self._result.clone()


def why_not(device: str) -> str | None:
    """Return why nothing can be recorded on a kind of device, or None if it can."""
    return None if device == "cuda" else "only what a CUDA device runs can be recorded"


def recorded(key: Hashable, step: Step, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``step(*inputs)``, recorded when the key is new to this thread and stream, and run again ever after.

    Parameters
    ----------
    key : hashable
        All that determines what the step does, apart from shapes, dtypes and device of the inputs.
    step : callable
        Takes tensors and returns one; it must not read any back to the host, nor draw random numbers.
    inputs : sequence of Tensor
        On one CUDA device. No gradients flow through.

    Returns
    -------
    Tensor
        The caller's own.
    """
    kept: OrderedDict[Hashable, _Recording] = _own.__dict__.setdefault("kept", OrderedDict())
    device = inputs[0].device
    where = (device, torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else (device, 0)
    whole = (key, where, tuple((t.shape, t.dtype) for t in inputs))
    found = kept.get(whole)
    if found is None:
        found = kept[whole] = _Recording(step, inputs)
        if len(kept) > _KEPT:
            kept.popitem(last=False)
    kept.move_to_end(whole)
    return found(inputs)


def forget() -> None:
    """Let go of all recordings of this thread, and of their memory."""
    _own.__dict__.clear()


def _capture(run: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, Callable[[], None]]:
    """Record what a function launches; return the memory of its result, and what launches it all again."""
    with torch.cuda.device(device), _capturing:
        aside, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(_WARM):
                run()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = run()
    return result, graph.replay
