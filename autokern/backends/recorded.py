"""The candidate `graph`: a small training step on a GPU, recorded once as a CUDA graph and launched again as a whole.

Such a step is sixty launches, which take the CPU longer than the GPU's work. A recording of fixed shapes computes
density and gradients, for one thread and one stream, and shares no memory with its callers. If the factorisation fails,
`fused` computes the step with stock's jitter, warnings and errors. Since recording changes state of the whole process,
it needs the user's permission, one Python thread, and no failed recording before.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch

from autokern.core.autograd import computed
from autokern.core.errors import recoverable
from autokern.core.state import Lock, permitted
from autokern.density import gaussian
from autokern.kernels.tree import Parts
from autokern.model.marginal import Marginal, ingredients
from autokern.ops._candidates import every, only
from autokern.ops.exact_log_prob import EXACT_LOG_PROB, in_place

Step = Callable[..., torch.Tensor]
_log = logging.getLogger("autokern")
_KEPT = 8  # most recordings
_FRESH = 64  # number of calls after which an unused recording may be replaced
_WARM = 3  # warm-up runs before a recording, in which libraries create handles and plans
_busy = Lock()  # no launch may run during a capture
_failed = ""


class _Recording:
    """One recorded step: the memory of its inputs and of its result, and its replay."""

    def __init__(self, step: Step, inputs: Sequence[torch.Tensor]) -> None:
        self._inputs = [t.detach().clone() for t in inputs]
        self._result, self._replay = _capture(lambda: step(*self._inputs), inputs[0].device)
        self.used = 0

    def __call__(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        with _busy.here():
            torch._foreach_copy_(self._inputs, [t.detach() for t in inputs])
            self._replay()
            return self._result.clone()


_recordings: OrderedDict[Hashable, _Recording] = OrderedDict()  # the most recently used last
_calls = itertools.count()


def unavailable(device: str) -> str | None:
    """Return why steps cannot be recorded, None if they can."""
    if "graphs" not in permitted:
        return "recording is off: AUTOKERN_GRAPHS=on allows it"
    return f"a recording failed in this process: {_failed}" if _failed else None


def recorded(key: Hashable, step: Step, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``step(*inputs)`` in new memory; the first call of a key in this thread and stream records it.

    The step takes tensors on one CUDA device and returns one, reads nothing back and draws no random numbers.
    """
    global _failed
    call, device = next(_calls), inputs[0].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    alike = torch.backends.cuda.matmul.fp32_precision, tuple((t.shape, t.dtype) for t in inputs)
    whole = (key, device, stream, threading.get_ident(), alike)
    with torch.autocast(device.type, enabled=False):
        found = _recordings.get(whole)
        if found is None:
            full = len(_recordings) >= _KEPT
            stale = full and call - next(iter(_recordings.values())).used >= _FRESH
            if _failed or threading.active_count() > 1 or (full and not stale):
                return step(*inputs)
            if stale:
                _recordings.popitem(last=False)
            try:
                found = _recordings[whole] = _Recording(step, inputs)
            except Exception as error:
                if recoverable(error, step):
                    forget()
                    _failed = f"{type(error).__name__}: {error}"
                    _log.warning("this process records no more steps: %s", _failed)
                raise
        _recordings.move_to_end(whole)
        found.used = call
        return found(inputs)


def forget() -> None:
    """Free all recordings and their memory."""
    _recordings.clear()


def _capture(run: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, Callable[[], None]]:
    """Record a function's launches, with cuBLAS's workspace; return the memory of its result and the replay."""
    with torch.cuda.device(device), _busy.here():
        here = torch.cuda.current_stream()
        aside = torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(here), warnings.catch_warnings():  # restores the caller's stream after an exception
            warnings.filterwarnings("error", message=".*CUDA Graph is empty.*")
            with torch.cuda.stream(aside):
                for _ in range(_WARM):
                    run()
            here.wait_stream(aside)
            graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[torch.cuda.current_device()]
            state = generator.clone_state()
            torch._C._cuda_clearCublasWorkspaces()
            try:
                with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                    result = run()
            except BaseException:
                generator.graphsafe_set_state(state)  # a capture that fails leaves a generator that draws no more
                raise
            finally:
                torch._C._cuda_clearCublasWorkspaces()
    return result, graph.replay


_MOST_BYTES = 2**25  # bytes of the matrix (2,000 points in float64) above which computing takes longer than launching


def _step(parts: Parts, wanted: tuple[bool, ...], *tensors: torch.Tensor) -> torch.Tensor:
    """Return the largest `info` of the factorisation, densities and gradients in one flat tensor."""
    density, info, gradients = gaussian.at_once(parts, wanted, tensors)
    failed = info.amax().to(density.dtype) if info.dim() else info.to(density.dtype)
    return torch.cat([part.reshape(-1) for part in (failed, density, *gradients) if part is not None])


_unsupported = every(
    only("only steps on a CUDA device can be recorded", lambda p: p.device == "cuda"),
    only("for large matrices the time of launches is negligible", lambda p: p.elements * p.itemsize <= _MOST_BYTES),
)


@EXACT_LOG_PROB.candidate(
    "graph",
    accuracy="better",
    unsupported=_unsupported,
    unavailable=unavailable,
    memory=lambda p: in_place(p, 2.8, 2.0),  # a recording keeps factor and inverse
    compiles=True,
)
def by_recording(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
    """Density and gradients as one recorded CUDA graph, for repeated steps of one shape."""
    tree, added, residual = ingredients(marginal, value)
    parts, shape, tensors = gaussian.arranged(tree, added, residual)
    wanted = tuple(t.requires_grad for t in tensors)
    with torch.no_grad():
        told = recorded((parts, wanted), functools.partial(_step, parts, wanted), tuple(tensors))
        failed = bool(told[0])
    if failed:
        return gaussian.log_prob(tree, added, residual)

    batch = tensors[1].shape[:-1]
    _, density, *flat = told.split([1, batch.numel(), *(t.numel() for t in tensors if t.requires_grad)])
    left = iter(flat)
    gradients = [next(left).view(t.shape) if want else t for t, want in zip(tensors, wanted, strict=True)]
    own = density.view(batch).clone()  # callers may write into the result
    out = computed(own, gradients, gaussian.plainly(parts), saved=tensors)
    return out if out.shape == shape else out.view(shape)
