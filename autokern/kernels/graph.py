"""A kernel matrix by torch's own machinery: vmap, cdist, torch.compile and TorchScript over raw tensors.

Each of these is often recommended, so each is a candidate, and ``autokern bench`` checks the claim on this machine.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autokern.kernels import analytic
from autokern.kernels.covariance import Covariance, same_points
from autokern.kernels.family import TINY, Family, families
from autokern.kernels.far import reach

__all__ = ["by_cdist", "compiled", "compiled_epilogue", "compiler_problem", "script_problem", "scripted", "vmapped"]


def vmapped(covariance: Covariance, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """Return the kernel matrix of single sets of points by torch.vmap over both; batch dimensions must be ones."""
    family, lengthscale, outputscale = covariance
    shape = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2], lengthscale.shape[:-2])
    x1, x2 = x1.reshape(x1.shape[-2:]), x2.reshape(x2.shape[-2:])
    scale, value = lengthscale.reshape(-1), family.formula

    def of_two_points(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return value(((a - b) / scale).square().sum() * family.gamma)

    k = torch.vmap(torch.vmap(of_two_points, in_dims=(None, 0)), in_dims=(0, None))(x1, x2)
    k = k.expand(*shape, *k.shape)
    return k if outputscale is None else k * outputscale[..., None, None]


def by_cdist(covariance: Covariance, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """Return the kernel matrix ``(..., n, m)`` by torch.cdist on differences (its matrix product is not PSD)."""
    family, lengthscale, outputscale = covariance
    distance = torch.cdist(x1 / lengthscale, x2 / lengthscale, compute_mode="donot_use_mm_for_euclid_dist")
    k = family(distance.square() * family.gamma)
    return k if outputscale is None else k * outputscale[..., None, None]


def _formula(family: Family) -> Callable[..., torch.Tensor]:
    """Return the whole computation on tensors alone, for compilers; `same` clears the diagonal."""
    gamma, value = family.gamma, family.formula

    def formula(
        x1: torch.Tensor, x2: torch.Tensor, lengthscale: torch.Tensor, outputscale: torch.Tensor, off: torch.Tensor
    ) -> torch.Tensor:
        centre = x1.mean(-2, keepdim=True)
        a, b = (x1 - centre) / lengthscale, (x2 - centre) / lengthscale
        square = a.square().sum(-1, keepdim=True) + b.square().sum(-1).unsqueeze(-2) - 2 * (a @ b.mT)
        # Clamped above zero, not at it: the huge slopes that some formulae have at zero then meet a zero, never the
        # rounding of points that coincide.
        return value(square.clamp_min(TINY) * off * gamma) * outputscale

    return formula


def _is_far(covariance: Covariance, x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """Whether points are too far apart for the formula, which expands squares in their own dtype."""
    family, lengthscale, _ = covariance
    centre = x1.mean(-2, keepdim=True)
    norms = (((x - centre) / lengthscale).square().sum(-1) for x in ((x1,) if x1 is x2 else (x1, x2)))
    return reach(family, family.gamma, *norms).far


def _off_diagonal(x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """Return the factor of distances: zero on the diagonal of equal points, else one."""
    if not same_points(x1, x2):
        return x1.new_ones(())
    return 1 - torch.eye(x1.shape[-2], dtype=x1.dtype, device=x1.device)


def _arguments(covariance: Covariance, x1: torch.Tensor, x2: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scale = covariance.outputscale
    scale = x1.new_ones(()) if scale is None else scale[..., None, None]
    return x1, x2, covariance.lengthscale, scale, _off_diagonal(x1, x2)


@functools.cache
def _compiled(name: str, dtype: torch.dtype, same: bool) -> Callable[..., torch.Tensor]:
    """Compile one formula for one dtype; a code object of its own, because torch counts recompilations by those."""
    formula = _formula(next(f for f in families() if f.name == name))
    formula.__code__ = formula.__code__.replace(co_name=f"{name}_{str(dtype)[6:]}_{'same' if same else 'cross'}")
    return torch.compile(formula, dynamic=True, fullgraph=True)


def compiled(covariance: Covariance, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """Return the kernel matrix by torch.compile; the first call of a process compiles for seconds.

    Sizes are dynamic, but a size of one is a constant to the compiler: lengthscales are expanded to all dimensions.
    """
    if _is_far(covariance, x1, x2):
        return analytic.matrix(covariance, x1, x2)
    x1, x2, lengthscale, outputscale, off = _arguments(covariance, x1, x2)
    call = _compiled(covariance.family.name, x1.dtype, off.dim() == 2)
    return call(x1, x2, lengthscale.expand(*lengthscale.shape[:-1], x1.shape[-1]), outputscale.expand(1, 1), off)


@functools.cache
def compiled_epilogue(of: Family, dtype: torch.dtype) -> Callable[..., None]:
    """Return the function that turns ``u``, one-dimensional, into ``k`` in place in one pass; its first call compiles.

    It uses one thread of its own: tiles are shared out among threads already.
    """

    def epilogue(u: torch.Tensor, *shape: torch.Tensor) -> None:
        u.copy_(of.formula(u, *shape))

    epilogue.__code__ = epilogue.__code__.replace(co_name=f"{of.name}_{str(dtype)[6:]}")  # as in `_compiled`
    return torch.compile(epilogue, dynamic=True, fullgraph=True, options={"cpp.threads": 1})


@functools.cache
def compiler_problem() -> str | None:
    """Return why torch.compile cannot work here, or None, without compiling."""
    if sys.platform != "linux":
        return "torch.compile is used on Linux only"
    compilers = ("CXX", "CC")
    named = [sysconfig.get_config_var(name) or "" for name in compilers]
    found = [c for c in ("g++", "clang++", "c++", *(n.split(" ")[0] for n in named if n)) if shutil.which(c)]
    return None if found else "torch.compile needs a C++ compiler, and none was found"


@functools.cache
def _scripted(name: str) -> Callable[..., torch.Tensor]:
    """Trace a formula apart from all that the caller has switched on, which a trace would keep for ever."""
    family = next(f for f in families() if f.name == name)
    with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad(), _without_autocast():
        warnings.simplefilter("ignore")
        example = torch.eye(3, dtype=torch.float32, device="cpu")[:, :2]
        one = example.new_ones
        arguments = (example, example + 1, one(1, 2), one(1, 1), one(()))
        traced: Any = torch.jit.trace(_formula(family), arguments, check_trace=False)
    return traced


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Switch autocast off for all kinds of devices that have it."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda", "mps", "xpu"):
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@functools.cache
def script_problem() -> str | None:
    """Return why TorchScript cannot work here."""
    return "TorchScript does not support Python 3.14 and later" if sys.version_info >= (3, 14) else None


def scripted(covariance: Covariance, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """Return the kernel matrix by TorchScript."""
    if _is_far(covariance, x1, x2):
        return analytic.matrix(covariance, x1, x2)
    return _scripted(covariance.family.name)(*_arguments(covariance, x1, x2))
