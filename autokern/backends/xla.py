"""The candidate `xla` of `kernel_matmul`: the product of a kernel matrix with few columns by JAX's compiler XLA.

XLA multiplies by blocks of rows, and fuses the families' own formulae into its passes over a block. Torch computes
gradients, tile by tile. The first call imports JAX, which is large, starts threads that do not survive a fork, and by
default reserves most of a GPU's memory.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from autokern.backends import installed
from autokern.core.errors import recoverable
from autokern.core.problem import Problem
from autokern.core.state import forked
from autokern.kernels import embedded as forms
from autokern.kernels import products
from autokern.kernels.family import Family
from autokern.kernels.matmul import matmul
from autokern.kernels.tiles import Plan, sides, usual
from autokern.kernels.tree import Node, Tree, by_formula, families_of, peeled
from autokern.ops._candidates import needs_few
from autokern.ops._problems import families
from autokern.ops.kernel_matmul import KERNEL_MATMUL, in_tiles, of_outputs
from autokern.system import host, threads

_BLOCK = {"cpu": 2**22, "cuda": 2**26}  # approximate bytes of a block of rows, by kind of device
_GPU_PACKAGES = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_failure = ""


def _jax() -> ModuleType:
    """Import JAX; `_jax_problem` reports a failure from then on."""
    global _failure
    try:
        import jax
        import jax.numpy
    except Exception as error:
        if recoverable(error):
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"
            _failure = f"JAX is installed, but importing it fails ({told})"
        raise
    return jax


def _jax_problem(device: str) -> str | None:
    """Return why XLA cannot work here on a kind of device, without importing JAX."""
    if _failure:
        return _failure
    if not installed("jax"):
        return "JAX is not installed: `pip install 'autokern[xla]'`"
    if forked():
        return "this process was forked, and JAX's threads do not survive a fork"
    gpu = any(map(installed, _GPU_PACKAGES)) and os.environ.get("JAX_PLATFORMS", "cuda").lower() != "cpu"
    if device not in _BLOCK or (device == "cuda" and not gpu):
        return f"the installed JAX has no devices of kind {device}"
    if gpu and os.environ.get(_PREALLOCATE, "").lower() not in ("false", "0"):
        return f"JAX would reserve most of the GPU's memory: set {_PREALLOCATE}=false, or JAX_PLATFORMS=cpu"
    few = min(threads.current(), host.thread_ceiling())
    if device == "cpu" and 2 * few < host.affinity():
        return f"XLA uses all {host.affinity()} CPUs, and only {few} threads are allowed"
    return None


def _padded(size: int) -> int:
    """Round a size up to five significant binary digits, because XLA compiles once per size."""
    return -(-size // step) * step if (step := 2 ** max(0, size.bit_length() - 5)) > 1 else size


def _rows_at_once(n: int, m: int, itemsize: int, device: str) -> int:
    """Return the number of rows of a block, a multiple of eight, so that equal blocks need little padding."""
    blocks = max(1, n * m * itemsize // _BLOCK.get(device, 1))
    return -(-n // (8 * blocks)) * 8


def _memory(problem: Problem) -> int:
    """Return the bytes of a block of rows for each leaf and for the result, and of copies of points and columns."""
    n, m = _padded(problem.m), _padded(problem.n)
    blocks = (1 + len(families(problem))) * _rows_at_once(n, m, problem.itemsize, problem.device) * m * problem.itemsize
    whole = blocks + 2 * of_outputs(problem)
    return max(whole, in_tiles(768)(problem)) if problem.grad else whole


@KERNEL_MATMUL.candidate("xla", unsupported=needs_few, unavailable=_jax_problem, memory=_memory, compiles=True)
def by_xla(kernel: Any, x1: torch.Tensor, x2: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """JAX's compiler with the family's formula, by blocks of rows, compiled once per form, sizes and dtype."""
    by = products.product if forked() else product  # a decision survives a fork, JAX's threads do not
    return matmul(*forms.both(kernel, x1, x2), rhs, usual(x1.device), by)


def product(tree: Tree, others: list[torch.Tensor] | None, rhs: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return ``K rhs`` by XLA; same arguments as `products.product`, which serves points that need double precision."""
    jax = _jax()
    inner, scale = peeled(tree)
    known = sides(inner, others)
    if any(side.rows.dtype is not rhs.dtype for side in known.leaves):  # far points, in double precision
        return products.product(tree, others, rhs, plan)
    n, m = known.shape
    block = _rows_at_once(_padded(n), _padded(m), rhs.element_size(), rhs.device.type)
    high, wide = -(-_padded(n) // block) * block, _padded(m)
    rows, columns = [_repeated(s.rows, high) for s in known.leaves], [_repeated(s.columns, wide) for s in known.leaves]
    filled = torch.nn.functional.pad(rhs, (0, 0, 0, wide - m))
    tensors = rows, columns, inner.shapes, inner.weights, filled
    with jax.enable_x64(rhs.dtype is torch.float64):
        arrays = jax.tree.map(lambda t: jax.dlpack.from_dlpack(t.detach().contiguous()), tensors)
        try:
            with jax.default_device(arrays[-1].device):
                found = _compiled()(inner.node, known.same, block, *arrays)
                found.block_until_ready()  # the caller may change its inputs afterwards
        except jax.errors.JaxRuntimeError as error:
            raise (MemoryError if "RESOURCE_EXHAUSTED" in str(error) else RuntimeError)(str(error)) from error
        out = from_dlpack(found)[:n]
    return (out if scale is None else out * scale).contiguous()


def _repeated(z: torch.Tensor, size: int) -> torch.Tensor:
    """Pad a matrix with copies of its last row; extra columns are multiplied by zeros, extra rows are cut off."""
    return z if z.shape[0] == size else torch.cat((z, z[-1:].expand(size - z.shape[0], -1)))


class _Value:
    """A JAX array with the methods and operators of a tensor that the families' formulae use."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __getattr__(self, name: str) -> Callable[[], _Value]:
        function = getattr(sys.modules["jax.numpy"], name)
        return lambda: _Value(function(self.array))


def _operator(name: str) -> Callable[..., _Value]:
    def apply(self: _Value, *others: Any) -> _Value:
        return _Value(getattr(self.array, name)(*(o.array if isinstance(o, _Value) else o for o in others)))

    return apply


for _name in ("neg", *(side + op for op in ("add", "sub", "mul", "truediv", "pow") for side in ("", "r"))):
    setattr(_Value, f"__{_name}__", _operator(f"__{_name}__"))


@functools.cache
def _compiled() -> Callable[..., Any]:
    """Return the jitted product; JAX compiles it once for each form, block size, shapes and dtype."""
    jax, jnp = sys.modules["jax"], sys.modules["jax.numpy"]

    def multiply(node: Node, same: bool, block: int, *arrays: Any) -> Any:
        rows, columns, shapes, weights, rhs = arrays

        def of_block(given: Any) -> Any:
            start, own = given

            def distance(of: Family, one: Any, other: Any) -> _Value:
                u = jnp.matmul(one, other.T, precision="highest")
                u = jnp.minimum(u, 0) if of.gamma < 0 else jnp.maximum(u, 0)
                if same:
                    down, right = (jax.lax.broadcasted_iota("int32", u.shape, axis) for axis in (0, 1))
                    u = jnp.where(down + start == right, 0, u)
                return _Value(u)

            us = map(distance, families_of(node), own, columns)
            value = by_formula(node, us, map(_Value, shapes), map(_Value, weights))
            k = jnp.broadcast_to(value.array, (block, rhs.shape[0]))
            return jnp.matmul(k, rhs, precision="highest")

        starts = jnp.arange(0, rows[0].shape[0], block, dtype="int32")
        found = jax.lax.map(of_block, (starts, [z.reshape(-1, block, z.shape[1]) for z in rows]))
        return found.reshape(rows[0].shape[0], rhs.shape[1])

    return jax.jit(multiply, static_argnums=(0, 1, 2))
