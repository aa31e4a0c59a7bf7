"""What several ops share: keys and problems of a matrix, random matrices, error bounds, moving data between devices."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from linear_operator import settings as library

from autokern.core.op import Op, Run
from autokern.core.problem import Features, Problem
from autokern.system import host, threads

__all__ = [
    "CG_ITERATIONS",
    "CG_VECTORS",
    "EPS",
    "PAGED",
    "as_asked",
    "device_of",
    "dtype_of",
    "is_ours",
    "is_paged",
    "iterates",
    "matrix_key",
    "matrix_problem",
    "moved",
    "needs_accelerator",
    "needs_batch",
    "needs_cpu_detour",
    "needs_few",
    "no_accelerator",
    "positive_definite",
    "random_matrix",
    "regime_features",
    "relative_error",
    "with_copies",
    "with_fewer_threads",
]

EPS = {"float32": 2.0**-23, "float64": 2.0**-52}
_DTYPES = {torch.float32: "float32", torch.float64: "float64"}
CG_ITERATIONS = 11
"""Iterations of conjugate gradients that the library never undercuts (and seldom exceeds at its training tolerance)."""
CG_VECTORS = 150
"""Vectors that conjugate gradients hold: eight or so of eleven columns, and a preconditioner of rank 15."""
PAGED = 2**25
"""Bytes above which the C library maps fresh memory for every matrix, and page faults decide."""
_THREADS = (1, 2, 4, 8, 16)
"""Numbers of threads that are tried where the machine has more."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_ours(*tensors: torch.Tensor) -> bool:
    """Whether these are ordinary, non-empty float tensors of one dtype and device, of at least two dimensions."""
    first = tensors[0]
    return all(
        type(t) in _PLAIN
        and t.dtype in _DTYPES
        and t.dtype is first.dtype
        and t.device == first.device
        and t.dim() >= 2
        and t.numel() > 0
        and t.layout is torch.strided
        for t in tensors
    )


def matrix_key(a: torch.Tensor) -> Any:
    """Return what determines the problem of a single matrix; read on every call, so cheap."""
    return (a.__class__, a.shape, a.dtype, a.device, a.layout, a.requires_grad and torch.is_grad_enabled())


def matrix_problem(op: str, a: torch.Tensor, **more: Any) -> Problem | None:
    """Return the problem of a single matrix ``(..., m, n)``, or None if the tensor is not an ordinary one."""
    if not is_ours(a):
        return None
    *batch, m, n = a.shape
    fields = {
        "m": m,
        "n": n,
        "batch": math.prod(batch),
        "grad": "a" if a.requires_grad and torch.is_grad_enabled() else "",
        "dtype": _DTYPES[a.dtype],
        "device": a.device.type,
    }
    return Problem(op=op, **{**fields, **more})


def dtype_of(problem: Problem) -> torch.dtype:
    """Return torch's dtype of a problem."""
    return torch.float32 if problem.dtype == "float32" else torch.float64


def device_of(problem: Problem) -> torch.device:
    """Return the device on which a problem's samples are made."""
    return torch.device("cpu") if problem.device == "cpu" else host.accelerator() or torch.device(problem.device)


def random_matrix(problem: Problem, generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Return a matrix of random numbers of unit variance (uniform: fast to draw), batched as the problem says."""
    full = (problem.batch, *shape) if problem.batch > 1 else shape
    drawn = torch.rand(full, generator=generator, dtype=dtype_of(problem), device="cpu")
    return drawn.sub_(0.5).mul_(12**0.5).to(device_of(problem))


def positive_definite(problem: Problem, generator: torch.Generator) -> torch.Tensor:
    """Return a covariance matrix as Gaussian processes have them: RBF of random points plus noise."""
    x = random_matrix(problem, generator, problem.n, 3)
    square = (x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1) if problem.n <= 256 else torch.cdist(x, x).square()
    k = square.mul_(-0.5).exp_()
    k.diagonal(dim1=-2, dim2=-1).add_(0.1)
    return k


def relative_error(problem: Problem, found: torch.Tensor, truth: torch.Tensor, growth: float = 1.0) -> float:
    """Return max |found - truth| in units of ``growth * eps * max |truth|``."""
    if truth.numel() == 0:
        return 0.0
    scale = truth.abs().max().item() or 1.0
    gap = (found.double() - truth).abs().max().item()
    return gap / (growth * EPS[problem.dtype] * scale)


def needs_batch(problem: Problem) -> str | None:
    """Reason against taking a batch apart."""
    return None if 1 < problem.batch <= 1024 else "there is no batch to take apart, or too large a one"


def needs_few(problem: Problem) -> str | None:
    """Reason against taking any batch apart in which each element is work for all threads."""
    return "a batch is taken apart, and this one is too large for that" if problem.batch > 64 else None


def needs_cpu_detour(problem: Problem) -> str | None:
    """Reason against moving the data to the CPU and back."""
    return "the data is on the CPU already" if problem.device == "cpu" else None


def needs_accelerator(problem: Problem) -> str | None:
    """Reason against moving the data to the accelerator and back."""
    return None if problem.device == "cpu" else "the data is on the accelerator already"


def no_accelerator(device: str) -> str | None:
    """Return what this machine lacks for that, if anything."""
    return "no accelerator here" if host.accelerator() is None else None


def moved(run: Run, to: Callable[[], torch.device | None]) -> Run:
    """Return `run` with its tensor arguments moved to a device and its results moved back."""

    @functools.wraps(run)
    def detour(*args: Any) -> Any:
        home = next(a.device for a in args if isinstance(a, torch.Tensor))
        there = to()
        out = run(*(a.to(there) if isinstance(a, torch.Tensor) else a for a in args))
        return tuple(o.to(home) for o in out) if isinstance(out, tuple) else out.to(home)

    return detour


def with_copies(
    features: Callable[[Problem], Features], elements: Callable[[Problem], int]
) -> Callable[[Problem], Features]:
    """Return features that also charge the copies of so many elements between devices."""

    def charged(problem: Problem) -> Features:
        plain = features(problem)
        copied = float(elements(problem) * problem.batch * problem.itemsize)
        return Features(plain.calls + 3, plain.flops, plain.bytes, copied)

    return charged


def with_fewer_threads(op: Op, name: str) -> None:
    """Register a candidate of an op again for each smaller number of threads, as ``name@1`` and so on.

    Its backward pass must keep to the number of threads that its forward pass had.
    """
    whole = op[name]

    def unsupported(problem: Problem) -> str | None:
        return whole.unsupported(problem) if problem.device == "cpu" else "threads matter on the CPU"

    def unavailable(count: int, device: str) -> str | None:
        if not threads.allowed():
            return "AUTOKERN_THREADS=off: autokern leaves threads alone"
        few = f"no more than {count} threads here anyway" if threads.ceiling() <= count else None
        return few or whole.unavailable(device)

    for count in _THREADS:
        run = threads.limited(whole.run, count)
        run.__doc__ = f"{whole.summary.rstrip('.')}; {count} thread{'s' * (count > 1)}."
        op.candidate(
            f"{name}@{count}",
            accuracy=whole.accuracy,
            unsupported=unsupported,
            unavailable=functools.partial(unavailable, count),
            memory=whole.memory,
            features=whole.features,
            threads=count,
        )(run)


def as_asked(exact: bool, n: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which stock factorises n rows if `exact` says so; in earnest the settings say it already."""
    if exact and n > library.max_cholesky_size.value():
        settings: contextlib.AbstractContextManager[Any] = library.fast_computations(False, False, False)
        return settings
    return contextlib.nullcontext()


def iterates(problem: Problem) -> bool:
    """Whether stock would run conjugate gradients."""
    return problem.variant.split("/")[-1] == "cg"


def is_paged(problem: Problem) -> bool:
    """Whether a matrix of the problem's size comes from the system page by page each time."""
    return problem.batch * problem.m * problem.n * problem.itemsize > PAGED


def regime_features(problem: Problem) -> tuple[float, ...]:
    """Place of a problem by what stock does: conjugate gradients say nothing of Cholesky, nor small of paged memory."""
    return (6.0 if iterates(problem) else 0.0, 1.5 * is_paged(problem))
