"""The cases of `memory.py`: candidates of ops, guarded calls of gpytorch and linear_operator, and how one is run.

What runs here runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from children import Peak, forget_peak
from gpytorch import kernels
from linear_operator import operators

import autokern
from autokern.core.op import tensors_in
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.core.state import inside

SIZES = {"float64": 5200, "float32": 7400}
"""A matrix of so many rows and columns takes 206 and 209 MiB."""
SMALL = 130
FAMILIES = ("rbf", "matern12", "matern32", "matern52")


class Case(msgspec.Struct, frozen=True):
    """A candidate of an op on a problem; or a method that is guarded, of what the candidate names."""

    what: str
    candidate: str
    problem: Problem

    def __str__(self) -> str:
        return f"{self.what} {self.candidate} {self.problem}"


def op_problems(dtype: str) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    """Yield problems of all ops with the candidates that are measured on them; none named: all that can serve."""
    n = SIZES[dtype]
    base = Problem(op="kernel_matrix", m=n, n=n, d=4, dtype=dtype)
    batched = base.replace(m=n // 6, n=n // 6, batch=36)
    exact = base.replace(op="exact_log_prob", grad="theta")
    predict = base.replace(op="predict", n=n // 2, m=n * 8 // 10)
    if dtype == "float32":
        for grad in ("", "theta"):
            yield base.replace(variant="matern52/same/ard", grad=grad), ("stock", "gemm", "tiled")
        yield base.replace(op="cholesky", d=0), ("stock",)
        yield base.replace(op="inv_quad_logdet", rhs=1, d=0, grad="a", variant="cholesky"), ("stock", "potri")
        yield exact.replace(variant="matern52/cholesky"), ("stock", "fused")
        yield predict.replace(variant="fast/cholesky"), ("stock", "eager", "lazy")
        return
    for grad in ("", "theta"):
        for family in FAMILIES:
            yield base.replace(variant=f"{family}/same/ard", grad=grad), ()
            yield base.replace(variant=f"{family}/same/iso", grad=grad), ("stock",)
            yield base.replace(variant=f"{family}/cross/ard", grad=grad), ("stock",)
        yield batched.replace(variant="matern52/same/ard", grad=grad), ("stock", "gemm")
        yield base.replace(op="inv_quad_logdet", rhs=1, d=0, grad=grad and "a", variant="cholesky"), ()
    yield base.replace(variant="matern52/cross/ard", grad="theta/x"), ("stock", "gemm")
    yield base.replace(op="cholesky", d=0), ()
    yield batched.replace(op="cholesky", d=0), ()
    yield base.replace(op="cholesky", d=0, grad="a"), ("stock",)
    yield base.replace(op="qr", m=5 * n, n=n // 5, d=0), ()
    products = base.replace(op="kernel_matmul", rhs=11, variant="matern52/same")
    wide = products.replace(m=100_000, n=100_000, d=60)  # points and sums are what tiles leave to count
    for grad in ("", "theta", "theta/x/rhs"):
        yield products.replace(grad=grad), ("stock",)
        yield wide.replace(grad=grad), ("tiled", "tiled-symmetric", "float32")
        yield wide.replace(grad=grad, variant="matern52/cross"), ("tiled", "float32")
    yield base.replace(op="inv_quad_logdet", rhs=1, d=0, grad="a", variant="cg"), ("stock",)
    for words in ("rbf/cholesky", "matern52/cholesky", "matern32+rbf/cholesky", "rbf/cg", "matern52/cg"):
        yield exact.replace(variant=words), ("stock",) if words.endswith("cg") else ()
    for words in ("rbf", "matern52", "matern32+rbf"):
        yield exact.replace(m=n // 6, n=n // 6, batch=36, variant=f"{words}/cholesky"), ("stock", "fused")
    for how in ("solve", "fast"):
        yield predict.replace(variant=f"{how}/cholesky"), ()
    yield predict.replace(m=20 * n, n=n // 8, variant="fast/cholesky"), ("lazy",)
    yield predict.replace(m=n // 4, n=n, grad="theta", variant="fast/cholesky"), ()
    yield base.replace(op="fantasy", m=2, rhs=1, variant="cholesky"), ()


KERNELS: dict[str, Callable[[], Any]] = {
    "rbf": kernels.RBFKernel,
    "scaled matern52": lambda: kernels.ScaleKernel(kernels.MaternKernel(2.5, ard_num_dims=4)),
    "sum": lambda: kernels.ScaleKernel(kernels.RBFKernel()) + kernels.ScaleKernel(kernels.MaternKernel(2.5)),
    "spectral mixture": lambda: kernels.SpectralMixtureKernel(num_mixtures=3, ard_num_dims=4),
}
TILED = ("rbf", "scaled matern52", "sum")
OPERATORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "added diagonal": lambda a: operators.AddedDiagLinearOperator(
        operators.DenseLinearOperator(a), operators.ConstantDiagLinearOperator(a.new_ones(1), len(a))
    ),
    "scaled": lambda a: operators.DenseLinearOperator(a) * 2.0,
    "root": lambda a: operators.RootLinearOperator(a[:, :50].clone()),
    "diagonal": lambda a: operators.DiagLinearOperator(a[0].clone()),
}


def cases() -> list[Case]:
    found = []
    for dtype, n in SIZES.items():
        for problem, names in op_problems(dtype):
            serving = [c.name for c in get(problem.op).feasible(problem) if c.threads <= 1]
            found += [Case(problem.op, name, problem) for name in serving if not names or name in names]
        guard = Problem(op="guard", m=n, n=n, d=4, dtype=dtype)
        for grad in ("", "theta"):
            if dtype == "float64":  # no candidate has this family: so many grids that fewer points will do
                mixture = guard.replace(m=n // 4, n=n // 4, grad=grad, variant="stock")
                found.append(Case("evaluate_kernel", "spectral mixture", mixture))
            found += [Case("evaluate_kernel", name, guard.replace(grad=grad, variant="tiled")) for name in TILED]
        found += [Case("to_dense", name, guard.replace(d=0)) for name in OPERATORS]
    return found


def run_op(case: Case) -> tuple[int, int]:
    """Run a candidate as a dispatched call does, with its backward pass; return bytes predicted and measured."""
    op, problem = get(case.what), case.problem
    candidate = op[case.candidate]
    args = op.sample(problem, torch.Generator().manual_seed(0))
    leaves = list({id(t): t for t in tensors_in(args) if t.requires_grad}.values())
    meter = Peak()
    inside.active = not candidate.parts
    with torch.set_grad_enabled(bool(problem.grad)):
        out = op.materialize(candidate.run(*args))
    most = meter.bytes()
    if problem.grad:
        outputs = tuple(t for t in tensors_in(op.canonical(out)) if t.requires_grad)
        cotangents = [torch.rand(o.shape, dtype=o.dtype) for o in outputs]
        forget_peak()
        torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
        most = max(most, meter.bytes() - sum(c.numel() * c.element_size() for c in cotangents))
    inside.active = False
    return candidate.memory(problem), most


def subject(case: Case) -> tuple[Any, Callable[[], Any]]:
    """Return the arguments of a guard, and the call that it guards."""
    problem, generator = case.problem, torch.Generator().manual_seed(0)
    dtype = torch.float64 if problem.dtype == "float64" else torch.float32
    if case.what == "evaluate_kernel":
        kernel = KERNELS[case.candidate]().to(dtype).requires_grad_(bool(problem.grad))
        lazy = kernel(torch.rand(problem.n, problem.d, dtype=dtype, generator=generator))
        return lazy, lazy.evaluate_kernel
    a = torch.rand(problem.n, problem.n, dtype=dtype, generator=generator)
    a.diagonal().add_(problem.n)  # and definite: only one triangle is read
    operator = OPERATORS[case.candidate](a)
    return operator, getattr(operator, case.what)


def predicted(watched: Any) -> int:
    from autokern.hooks import memory

    return memory.needed(watched)


def run_guard(case: Case) -> tuple[int, int]:
    """Run a guarded call; return bytes predicted and measured."""
    watched, call = subject(case)
    before = predicted(watched)
    tiled = case.problem.variant == "tiled"
    with autokern.using(force={"kernel_matrix": "tiled" if tiled else "stock"}):
        meter = Peak()
        with torch.set_grad_enabled(bool(case.problem.grad)):
            out = call()
        peak = meter.bytes()
    del out
    return before, peak


def run(case: Case) -> tuple[int, int]:
    """Return bytes predicted and measured of one case in this process, after a small one that loads what it needs."""
    problem = case.problem
    small = problem.replace(m=SMALL, n=SMALL if problem.m == problem.n else 30, batch=min(problem.batch, 2))
    if problem.op == "predict":
        small = small.replace(m=3 * SMALL if problem.m > problem.n else 30, n=SMALL)
    if problem.op == "fantasy":
        small = small.replace(m=problem.m, n=SMALL)
    autokern.enable()
    measure = run_guard if problem.op == "guard" else run_op
    measure(Case(case.what, case.candidate, small.replace(rhs=min(small.rhs, 30))))
    return measure(case)
