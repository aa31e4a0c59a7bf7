"""Shared by several ops: keys and problems of a matrix, samples, error bounds, candidates on another device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from linear_operator import settings as library
from linear_operator.utils.errors import NanError, NotPSDError
from msgspec import structs

from autokern.core.errors import caught
from autokern.core.op import Op, Run, rebuilt, tensors_in
from autokern.core.problem import Problem
from autokern.kernels import embedded
from autokern.kernels import tree as trees
from autokern.kernels.family import known_family
from autokern.kernels.tree import Node
from autokern.system import host, threads

EPS = {"float32": 2.0**-23, "float64": 2.0**-52}
_DTYPES = {torch.float32: "float32", torch.float64: "float64"}
CG_ITERATIONS = 11
"""The smallest number of iterations of the library's conjugate gradients; `iterations` has counts of real models."""
CG_VECTORS = 150
"""Vectors that conjugate gradients hold: about eight sets of eleven columns, and a preconditioner of rank 15."""
_SMALL = {"float64": 400, "float32": 255}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


Rule = Callable[[Problem], "str | None"]
"""Says why a candidate cannot serve a problem, or None."""


class OpOfParts(Op):
    """An Op whose stock calls other ops, among them a factorisation, whose errors it may raise."""

    raises = (NanError, NotPSDError)
    composite = True

    def small(self, problem: Problem) -> bool:
        """Whether `arrays`, where it can serve, needs no measurement: points are few, twice as many for a mixture."""
        most = 2 if "mixture" in families(problem) else 1
        return problem.n * problem.batch <= most * _SMALL[problem.dtype]

    def default_candidate(self, problem: Problem) -> str:
        """Return `arrays` for small problems, in which stock's modules, autograd nodes and launches dominate."""
        if problem.device != "cpu":  # computed on the CPU, and an accelerator gains sooner by more points
            problem = problem.replace(m=2 * problem.m, n=2 * problem.n)
        return "arrays" if self.small(problem) else "stock"


def is_ours(*tensors: torch.Tensor) -> bool:
    """Whether all are plain, strided, non-empty float matrices, perhaps batched, of one dtype and device."""
    return alike(*tensors) and all(
        t.dtype in _DTYPES and t.dim() >= 2 and t.numel() > 0 and t.layout is torch.strided for t in tensors
    )


def alike(*tensors: torch.Tensor) -> bool:
    """Whether all are plain tensors of one dtype and device."""
    first = tensors[0]
    return all(type(t) in _PLAIN and t.dtype is first.dtype and t.device == first.device for t in tensors)


def matrix_key(a: torch.Tensor, *_: Any) -> Any:
    return (a.__class__, a.shape, a.dtype, a.device, a.layout, a.requires_grad and torch.is_grad_enabled())


def matrix_problem(op: str, a: torch.Tensor, square: bool = False, **more: Any) -> Problem | None:
    """Return the problem of a single matrix ``(..., m, n)``; None if it is not a plain tensor, or not square."""
    if not is_ours(a) or (square and a.shape[-1] != a.shape[-2]):
        return None
    *batch, m, n = a.shape
    fields: dict[str, Any] = {"m": m, "n": n, "batch": math.prod(batch), "dtype": _DTYPES[a.dtype]}
    grad = "a" if a.requires_grad and torch.is_grad_enabled() else ""
    return Problem(op=op, **{**fields, "device": a.device.type, "grad": grad, **more})


def kernel_problem(op: str, node: Node, kernel: Any, *tensors: torch.Tensor, more: str = "") -> Problem | None:
    """Return the problem of a kernel, perhaps `Embedded`, on ``x1, x2`` (and columns ``rhs``); None if unsupported."""
    (x1, x2, *rhs), names, parameters = tensors, sorted(trees.leaves(node)), embedded.parameters(kernel)
    if not names or x1.shape[-1] != x2.shape[-1]:
        return None
    if any(t.dtype is not x1.dtype or t.device != x1.device for t in parameters):
        return None  # stock promotes
    try:
        batch = torch.broadcast_shapes(*(t.shape[:-2] for t in tensors), getattr(kernel, "batch_shape", ()))
    except caught(RuntimeError):
        return None
    wanted = {"theta": parameters, "x": (x1, x2), "rhs": rhs} if torch.is_grad_enabled() else {}
    grad = "/".join(word for word, of in wanted.items() if any(t.requires_grad for t in of))
    variant = f"{'+'.join(names)}/{'same' if x1 is x2 else 'cross'}{more}"
    (m, d), n, columns = x1.shape[-2:], x2.shape[-2], rhs[0].shape[-1] if rhs else 0
    return matrix_problem(op, x1, m=m, n=n, d=d, rhs=columns, batch=batch.numel(), grad=grad, variant=variant)


def device_of(problem: Problem) -> torch.device:
    return torch.device("cpu") if problem.device == "cpu" else host.accelerator() or torch.device(problem.device)


def random_matrix(problem: Problem, generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Return a matrix of uniform random numbers of unit variance, with the problem's batch."""
    full = (problem.batch, *shape) if problem.batch > 1 else shape
    drawn = torch.rand(full, generator=generator, dtype=getattr(torch, problem.dtype), device="cpu")
    return drawn.sub_(0.5).mul_(12**0.5).to(device_of(problem))


def positive_definite(problem: Problem, generator: torch.Generator) -> torch.Tensor:
    """Return a covariance matrix of random points: RBF plus noise of 0.1."""
    x = random_matrix(problem, generator, problem.n, 3)
    square = (x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1) if problem.n <= 256 else torch.cdist(x, x).square()
    k = square.mul_(-0.5).exp_()
    k.diagonal(dim1=-2, dim2=-1).add_(0.1)
    return k


def only(words: str, serves: Callable[[Problem], bool]) -> Rule:
    """Return the rule of a candidate that cannot serve other problems, for the reason `words`."""
    return lambda problem: None if serves(problem) else words


def every(*rules: Rule) -> Rule:
    """Return the rule of a candidate that must keep several; the first reason counts."""
    return lambda problem: next((why for rule in rules if (why := rule(problem)) is not None), None)


needs_few = only("only for batches of at most 64 matrices", lambda p: p.batch <= 64)
"""For candidates that use all threads for each matrix."""
needs_tall = only("only for at least twice as many rows as columns", lambda p: p.m >= 2 * p.n)
needs_cpu_detour = only("the data is on the CPU already", lambda p: p.device != "cpu")
needs_accelerator = only("the data is on the accelerator already", lambda p: p.device == "cpu")


class Bytes(Protocol):
    """A memory rule."""

    def __call__(self, problem: Problem) -> int: ...


def squares(plain: float, graded: float | None = None) -> Bytes:
    """Return a memory rule: so many matrices ``(n, n)`` without gradients, and with them (default: as many)."""

    def memory(problem: Problem) -> int:
        count = plain if graded is None or not problem.grad else graded
        return int(count * problem.batch * problem.n**2 * problem.itemsize)

    return memory


def moved(run: Run, there: torch.device, args: tuple[Any, ...]) -> Any:
    """Run with all tensors of the arguments on a device, and return the results on the device of the arguments."""
    home = next(tensors_in(args)).device
    return rebuilt(run(*rebuilt(args, lambda t: t.to(there))), lambda t: t.to(home))


def on_other_devices(
    op: Op,
    run: Run,
    summary: str,
    *,
    read: Callable[..., tuple[Any, ...]] = lambda *args: args,
    on_cpu: Rule = needs_cpu_detour,
    on_accelerator: Rule = needs_accelerator,
    **options: Any,
) -> None:
    """Register the candidates ``cpu`` and ``accelerator``, whose name stands for ``{}`` in `summary`.

    `read` makes the arguments of `run` of those of the op; the tensors among them move to the device.
    """

    def register(name: str, unsupported: Rule) -> None:
        def there() -> Any:
            return torch.device("cpu") if name == "cpu" else host.accelerator()

        def detour(*args: Any) -> Any:
            return moved(run, there(), read(*args))

        def unavailable(device: str) -> str | None:
            return "this machine has no accelerator" if there() is None else None

        detour.__doc__ = summary.format("CPU" if name == "cpu" else name)
        op.candidate(name, unsupported=unsupported, unavailable=unavailable, **options)(detour)

    register("cpu", on_cpu)
    register("accelerator", on_accelerator)


def with_one_thread(op: Op, name: str) -> None:
    """Register a candidate for one thread, its backward pass included, as ``name@1``."""
    whole = op[name]

    on_cpu = only("the number of threads matters only on a CPU", lambda p: p.device == "cpu")

    def unavailable(device: str) -> str | None:
        if not threads.allowed():
            return "AUTOKERN_THREADS=off leaves the number of threads alone"
        if threads.ceiling() == 1:
            return "this process has one thread"
        return whole.unavailable(device)

    own = {"name": f"{name}@1", "summary": f"{whole.summary.rstrip('.')}; one thread.", "threads": 1}
    own |= {"unsupported": every(on_cpu, whole.unsupported), "unavailable": unavailable}
    op.listed.append(structs.replace(whole, run=threads.limited(whole.run, 1), **own))


def as_asked(exact: bool, n: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which stock factorises n rows if `exact`; real calls have such settings already."""
    asked = exact and n > library.max_cholesky_size.value()
    return library.fast_computations(False, False, False) if asked else contextlib.nullcontext()


def iterates(problem: Problem) -> bool:
    return "cg" in problem.words


LOW_RANK = "the library solves a linear kernel by its rank"
"""Why a linear kernel alone is left to stock: in a few dimensions this is far cheaper than a factor of all points."""


def families(problem: Problem) -> list[str]:
    """Return the kernel families of a problem: the first word of its variant."""
    return problem.words[0].split("+")


of_trees = only("for stationary kernels", lambda p: all(known_family(name) for name in families(p)))
"""For candidates that need a tree of known families."""
