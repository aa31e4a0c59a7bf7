"""Memory: what candidates and guards predict of their peak against what a fresh process really takes.

Every case runs in a child process of its own: arguments are made, the peak that Linux keeps of resident memory is
reset, the call runs (and its backward pass, where gradients are wanted), and the peak is read. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpytorch
import msgspec
import torch
from gpytorch import kernels
from linear_operator.operators import AddedDiagLinearOperator, ConstantDiagLinearOperator, DenseLinearOperator

import autokern
from autokern.arguments import tensors_in
from autokern.op import get, inside
from autokern.problem import Problem

HERE = Path(__file__).parent
JSON = HERE / "memory.json"
WITHIN = 0.2
"""What a prediction may be off by, as a part of what was measured."""
LEAST = 200 * 2**20
"""Smaller peaks are not compared: interpreter and libraries take some megabytes too."""
_SIZES = {"float64": 3600, "float32": 5000}
_CHILD = {
    "MALLOC_MMAP_THRESHOLD_": str(2**20),  # what is freed goes back at once, and what was freed before hides nothing
    "MALLOC_TRIM_THRESHOLD_": str(2**20),
    "AUTOKERN_CALIBRATE": "never",
}


class Case(msgspec.Struct, frozen=True):
    """One call: a candidate of an op on a problem, or a guarded position with a kernel."""

    what: str
    candidate: str
    problem: Problem

    @property
    def is_op(self) -> bool:
        """Whether this is a candidate of an op."""
        return self.what == self.problem.op


class Row(msgspec.Struct, frozen=True):
    """A case with bytes predicted and measured."""

    case: Case
    predicted: int
    measured: int

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


# --- the cases --------------------------------------------------------------------------------------------------------


def op_cases() -> list[Case]:
    """Return every candidate that runs on this host on problems of each op."""
    problems: list[Problem] = []
    for dtype, n in _SIZES.items():
        base = Problem(op="kernel_matrix", m=n, n=n, d=4, dtype=dtype)
        for family in ("rbf", "matern12", "matern32", "matern52"):
            for how in ("same/ard", "same/iso", "cross/ard"):
                for grad in ("", "theta"):
                    problems.append(base.replace(variant=f"{family}/{how}", grad=grad))
        problems += [base.replace(variant=f"{f}/cross/ard", grad="theta/x") for f in ("rbf", "matern52")]
        problems += [
            base.replace(m=n // 6, n=n // 6, batch=36, variant="matern52/same/ard", grad=g) for g in ("", "theta")
        ]
        problems.append(
            base.replace(op="matmul", m=900_000 if dtype == "float64" else 1_800_000, n=8, d=0, rhs=18, variant="rows")
        )
        for op in ("cholesky", "cholesky_inverse"):
            problems.append(base.replace(op=op, d=0))
            problems.append(base.replace(op=op, m=n // 6, n=n // 6, batch=36, d=0))
        problems.append(base.replace(op="cholesky", d=0, grad="a"))
        few = 2400 if dtype == "float64" else 3200
        problems.append(base.replace(op="eigh", m=few, n=few, d=0))
        problems.append(base.replace(op="qr", m=20_000, n=900 if dtype == "float64" else 1600, d=0))
        problems.append(base.replace(op="solve_triangular", n=n, m=n, rhs=n, d=0))
        for grad in ("", "a"):
            problems.append(base.replace(op="inv_quad_logdet", rhs=1, d=0, grad=grad, variant="cholesky"))
        problems.append(base.replace(op="inv_quad_logdet", rhs=1, d=0, grad="a", variant="cg"))
        for words in ("rbf/cholesky", "matern52/cholesky", "rbf/cg", "matern32+rbf/cholesky"):
            problems.append(base.replace(op="exact_log_prob", grad="theta", variant=words))
        problems.append(base.replace(op="predict", m=8 * n // 10, n=n // 2, variant="solve/cholesky"))
        problems.append(base.replace(op="predict", m=8 * n // 10, n=n // 2, variant="fast/cholesky"))
        problems.append(base.replace(op="predict", m=20 * n, n=n // 8, variant="fast/cholesky"))
        problems.append(base.replace(op="predict", m=n // 4, n=n, grad="theta", variant="fast/cholesky"))
        problems.append(base.replace(op="fantasy", m=2, n=n, rhs=1, variant="cholesky"))
    found = []
    for problem in problems:
        op = get(problem.op)
        for candidate in op.feasible(problem):
            if candidate.threads <= 1:  # the others differ in nothing that takes memory
                found.append(Case(problem.op, candidate.name, problem))
    return found


KERNELS: dict[str, Callable[[], Any]] = {
    "rbf": lambda: kernels.RBFKernel(),
    "scaled rbf": lambda: kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=4)),
    "matern12": lambda: kernels.MaternKernel(0.5),
    "matern32": lambda: kernels.MaternKernel(1.5),
    "matern52": lambda: kernels.MaternKernel(2.5),
    "scaled matern52": lambda: kernels.ScaleKernel(kernels.MaternKernel(2.5, ard_num_dims=4)),
    "rq": lambda: kernels.RQKernel(),
    "scaled rq": lambda: kernels.ScaleKernel(kernels.RQKernel()),
    "periodic": lambda: kernels.PeriodicKernel(),
    "spectral": lambda: kernels.SpectralMixtureKernel(num_mixtures=3, ard_num_dims=4),
    "sum": lambda: kernels.ScaleKernel(kernels.RBFKernel()) + kernels.ScaleKernel(kernels.MaternKernel(2.5)),
    "product": lambda: kernels.RBFKernel() * kernels.PeriodicKernel(),
    "scaled sum": lambda: kernels.ScaleKernel(kernels.RQKernel() + kernels.RBFKernel()),
    "keops rbf": lambda: kernels.keops.RBFKernel(),
}
POSITIONS = ("evaluate_kernel", "to_dense")


def guard_cases() -> list[Case]:
    """Return the positions at which gpytorch's own code is guarded, with the kernels of the table."""
    found = []
    for dtype, n in _SIZES.items():
        for name in KERNELS:
            for grad in ("", "theta"):
                size = n // 4 if name == "spectral" else n // 2 if name in ("keops rbf", "periodic", "product") else n
                found.append(
                    Case("evaluate_kernel", name, Problem(op="guard", m=size, n=size, d=4, dtype=dtype, grad=grad))
                )
        for name in ("rbf", "scaled matern52", "sum"):
            for grad in ("", "theta"):
                found.append(
                    Case(
                        "evaluate_kernel",
                        name,
                        Problem(op="guard", m=n, n=n, d=4, dtype=dtype, grad=grad, variant="tiled"),
                    )
                )
        for name in OPERATORS:
            found.append(Case("to_dense", name, Problem(op="guard", m=n, n=n, dtype=dtype)))
        found.append(Case("_cholesky", "dense", Problem(op="guard", m=n, n=n, dtype=dtype)))
        found.append(Case("_cholesky", "added diagonal", Problem(op="guard", m=n, n=n, dtype=dtype)))
        found.append(Case("covar_cache", "rbf", Problem(op="guard", m=n, n=n, d=4, dtype=dtype)))
    return found


def _random(problem: Problem) -> torch.Tensor:
    return torch.rand(problem.n, problem.n, dtype=getattr(torch, problem.dtype))


def _definite(problem: Problem) -> torch.Tensor:
    a = _random(problem).mul_(1e-3)
    a = a.add_(a.mT.clone())
    a.diagonal().add_(problem.n)
    return a


def _added(problem: Problem, a: torch.Tensor) -> Any:
    return AddedDiagLinearOperator(DenseLinearOperator(a), ConstantDiagLinearOperator(a.new_ones(1), problem.n))


OPERATORS: dict[str, Callable[[Problem], Any]] = {
    "added diagonal": lambda p: _added(p, _random(p)),
    "scaled": lambda p: DenseLinearOperator(_random(p)) * 2.0,
    "root": lambda p: (
        gpytorch.linear_operator.operators.RootLinearOperator(_random(p)[:, :50].clone())
        if hasattr(gpytorch, "linear_operator")
        else __import__("linear_operator").operators.RootLinearOperator(_random(p)[:, :50].clone())
    ),
    "diagonal": lambda p: __import__("linear_operator").operators.DiagLinearOperator(_random(p)[0].clone()),
    "toeplitz": lambda p: __import__("linear_operator").operators.ToeplitzLinearOperator(_random(p)[0].clone()),
}


# --- one case, in a process of its own --------------------------------------------------------------------------------


def status(field: str) -> int:
    """Return a figure of this process's memory in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0])


class Meter:
    """The peak of resident memory above what there was at the start, piece by piece."""

    def __init__(self) -> None:
        gc.collect()
        self._before, self.peak = status("VmRSS"), 0
        self.reset()

    def reset(self) -> None:
        """Let the kernel take the peak of from now on."""
        Path("/proc/self/clear_refs").write_text("5")

    def read(self, given: int = 0) -> None:
        """Take in the peak since the last reset, less what was `given` since the start."""
        self.peak = max(self.peak, status("VmHWM") - self._before - given)


def run_op(case: Case, meter: bool = True) -> int:
    """Run a candidate as a dispatched call does; return the peak in bytes."""
    op, problem = get(case.problem.op), case.problem
    candidate = op[case.candidate]
    args = op.sample(problem, torch.Generator().manual_seed(0))
    leaves = list({id(t): t for t in tensors_in(args) if t.requires_grad}.values())
    taken = Meter()
    inside.active = not candidate.parts
    with torch.set_grad_enabled(bool(problem.grad)):
        out = op.read(candidate.run(*args))
    taken.read()
    if problem.grad:
        outputs = tuple(t for t in tensors_in(op.canonical(out)) if t.requires_grad)
        cotangents = [torch.rand(o.shape, dtype=o.dtype) for o in outputs]
        taken.reset()
        torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
        taken.read(sum(c.numel() * c.element_size() for c in cotangents))
    inside.active = False
    return taken.peak


def points(problem: Problem) -> torch.Tensor:
    return torch.rand(
        problem.n, problem.d, dtype=getattr(torch, problem.dtype), generator=torch.Generator().manual_seed(0)
    )


def subject(case: Case) -> tuple[Any, Callable[[], Any]]:
    """Return what a guard looks at, and the call that it guards."""
    problem = case.problem
    if case.what == "evaluate_kernel":
        kernel = KERNELS[case.candidate]().to(getattr(torch, problem.dtype))
        kernel.requires_grad_(bool(problem.grad))
        x = points(problem)
        lazy = kernel(x)
        return lazy, lambda: lazy.evaluate_kernel().to_dense() if "keops" in case.candidate else lazy.evaluate_kernel()
    if case.what == "to_dense":
        operator = OPERATORS[case.candidate](problem)
        return operator, operator.to_dense
    if case.what == "_cholesky":
        operator = (
            DenseLinearOperator(_definite(problem))
            if case.candidate == "dense"
            else _added(problem, _definite(problem))
        )
        return operator, operator._cholesky
    from autokern.ops._models import trained

    model = trained(problem.replace(op="predict", variant="fast/cholesky"), torch.Generator().manual_seed(0))
    return model.strategy, lambda: model.strategy.covar_cache


def run_guard(case: Case) -> tuple[int, int]:
    """Run a guarded call; return the peak in bytes, and what the guard predicts."""
    from autokern.hooks import memory

    watched, call = subject(case)
    tiled = case.problem.variant == "tiled"
    predicted = memory.needed(case.what, watched, dispatched=tiled)
    with autokern.using(force={"kernel_matrix": "tiled" if tiled else "stock"}):
        taken = Meter()
        with torch.set_grad_enabled(bool(case.problem.grad)):
            out = call()
        taken.read()
    del out
    return taken.peak, predicted


def run(case: Case) -> Row:
    """Measure one case in this process, after a small one of its kind that loads what it needs."""
    small = case.problem.replace(
        m=min(case.problem.m, 130),
        n=min(case.problem.n, 90 if case.problem.m != case.problem.n else 130),
        batch=min(case.problem.batch, 2),
    )
    autokern.enable()
    warm = Case(case.what, case.candidate, small.replace(rhs=min(small.rhs, 20)))
    if case.is_op:
        run_op(warm)
        return Row(case, get(case.problem.op)[case.candidate].memory(case.problem), run_op(case))
    run_guard(warm)
    measured, predicted = run_guard(case)
    return Row(case, predicted, measured)


# --- all of them ------------------------------------------------------------------------------------------------------


def in_child(case: Case) -> Row:
    """Measure one case in a fresh process."""
    command = [sys.executable, str(Path(__file__)), "--one", msgspec.json.encode(case).decode()]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **_CHILD}, check=False)
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr[-2000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Row)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="")
    options = parser.parse_args(arguments)
    if options.one:
        print(msgspec.json.encode(run(msgspec.json.decode(options.one, type=Case))).decode())
        return 0
    for case in [*op_cases(), *guard_cases()]:
        label = f"{case.what} {case.candidate} {case.problem}"
        if options.only and not all(w in label for w in options.only.split(",")):
            continue
        try:
            row = in_child(case)
        except RuntimeError as error:
            print(label, str(error)[-300:], flush=True)
            continue
        u = case.problem.batch * case.problem.m * case.problem.n * case.problem.itemsize
        print(f"{row.ratio:6.2f}  {row.measured / u:6.2f}u {row.measured / 2**20:7.0f}MiB {label}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
