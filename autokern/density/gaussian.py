"""The log density of a Gaussian with a kernel tree as covariance, factorised, with all gradients in one function.

``log p(r) = -(r^T K^-1 r + log |K| + n log 2 pi) / 2`` with ``dL/dK = (a a^T - K^-1) / 2``, ``a = K^-1 r``
(Rasmussen and Williams 2006, eq. 5.9). The matrix is built, factorised, inverted and differentiated in one buffer; its
derivatives are formed block by block and never kept. Second derivatives differentiate `reference`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpytorch.kernels import ScaleKernel
from linear_operator import to_dense
from torch.func import functional_call

from autokern.core.autograd import computed
from autokern.density.factors import factorised, inverted, inverted_by_products
from autokern.density.matrices import LOG_2_PI, log_density
from autokern.kernels import tree as trees
from autokern.kernels.matrix import Blocks, bytes_on, row_blocks
from autokern.kernels.tree import Parts, Tree, apart, centre_of, flattened
from autokern.model.libraries import psd_safe_cholesky
from autokern.system import memory, threads

State = tuple[Blocks, torch.Tensor, torch.Tensor]  # results of the forward pass, the lower factor and ``L^-1 r``
CACHED = 2**20  # bytes of a block of rows that stays in a CPU's cache; a dozen such blocks are held beside the matrix


def log_prob(tree: Tree, noise: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the log density of a residual ``(..., n)`` with noise ``(..., 1)`` or ``(..., n)`` on the tree."""
    parts, shape, tensors = arranged(tree, noise, residual)
    differentiated, most = torch.is_grad_enabled() and any(t.requires_grad for t in tensors), torch.get_num_threads()
    with torch.no_grad():
        state = _stated(parts, tensors, keep=differentiated)
        density = _density(*state[1:])
    if not differentiated:
        return density if density.shape == shape else density.view(shape)
    states = [state]

    def found(wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        # a second backward pass factorises again, since the first one overwrote the factor
        return gradients_by(states.pop() if states else _stated(parts, tensors, keep=True), tensors[0], wanted)

    del state
    out = computed(density, threads.limited(found, most), plainly(parts), saved=tensors)
    return out if out.shape == shape else out.view(shape)


def arranged(tree: Tree, noise: torch.Tensor, residual: torch.Tensor) -> tuple[Parts, torch.Size, list[torch.Tensor]]:
    """Return the form of a tree, the batch shape, and noise, residual and the tree's tensors with a flat batch."""
    parts, own = apart(tree)
    return parts, *flattened([noise, residual, *own], [1, 1, *parts.dims])


def reference(tree: Tree, noise: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the log density by plain torch steps, differentiable to any order: the reference for `log_prob`."""
    return log_density(trees.dense(tree), noise, residual)


def plainly(parts: Parts) -> Callable[..., torch.Tensor]:
    """Return `reference` as a function of noise, residual and the tensors of a tree."""
    return lambda noise, residual, *rest: reference(parts.tree(rest), noise, residual)


def dense(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    """Return a kernel's matrix by plain torch steps, since evaluating the library's operators may add jitter."""
    if trees.form(kernel, keops=True) is not None:
        return trees.dense(trees.read(kernel, x, centre_of(x)))
    kind = type(kernel)
    if kind is ScaleKernel:
        return kernel.outputscale[..., None, None] * dense(kernel.base_kernel, x)
    if kind not in trees.BRANCHES:
        return to_dense(kernel.forward(x, x))
    chosen = [(child, child.active_dims) for child in kernel.kernels]
    parts = (dense(child, x if active is None else x.index_select(-1, active)) for child, active in chosen)
    return functools.reduce(torch.add if trees.BRANCHES[kind] == "sum" else torch.mul, parts)


def replacing(
    root: torch.nn.Module, names: list[str], function: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Return `function` with further arguments: the values that the parameters `names` of `root` have in the call."""

    def of(*tensors: torch.Tensor) -> torch.Tensor:
        caller: Any = torch.nn.Module()
        caller.root, caller.forward = root, function
        own = len(tensors) - len(names)
        modules = [(f"{at}." if at else "", one) for at, one in root.named_modules()]
        places = [(at + name, raw) for at, one in modules for name, raw in one._parameters.items()]
        given = {id(raw): tensors[own + names.index(name)] for name, raw in places if name in names}
        replaced = {f"root.{name}": given[id(raw)] for name, raw in places if id(raw) in given}  # tied ones too
        # torch does not restore tied weights of modules that are shared, as `root` is
        return functional_call(caller, replaced, tensors[:own], tie_weights=False)

    return of


def _assemble(blocks: Blocks, noise: torch.Tensor, buffer: torch.Tensor, keep: bool) -> None:
    """Fill at least the lower triangle of a buffer with the noisy covariance."""
    steps = row_blocks(buffer, CACHED)
    little = buffer.numel() * buffer.element_size() <= bytes_on(CACHED, buffer.device.type)
    for start, stop in steps:
        out = buffer if stop - start == buffer.shape[-1] else buffer[start:stop, :stop]
        blocks.fill((start, stop), out, keep and len(steps) == 1 and little)
    buffer.diagonal(dim1=-2, dim2=-1).add_(noise)


def _density(factor: torch.Tensor, white: torch.Tensor) -> torch.Tensor:
    """Return the log density from the factor L and the whitened residual ``L^-1 r``."""
    half_logdet = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    quadratic = torch.linalg.vecdot(white, white, dim=-2).view(half_logdet.shape)
    return half_logdet.add_(white.shape[-2] * (0.5 * LOG_2_PI)).neg_().sub_(quadratic, alpha=0.5)


def at_once(
    parts: Parts, wanted: tuple[bool, ...], tensors: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """Return log density, LAPACK's info and the wanted gradients without synchronising with the device."""
    noise, residual, *rest = tensors
    buffer = residual.new_empty((*residual.shape, residual.shape[-1]))
    blocks = Blocks(parts.tree(rest), mirrored=True, look=False)
    _assemble(blocks, noise, buffer, keep=True)
    factor, info = torch.linalg.cholesky_ex(buffer)
    white = torch.linalg.solve_triangular(factor, residual.unsqueeze(-1), upper=False)
    return _density(factor, white), info, gradients_by((blocks, factor, white), noise, wanted, inverted_by_products)


def _stated(parts: Parts, tensors: Sequence[torch.Tensor], keep: bool) -> State:
    """Factorise in memory of huge pages; `keep` stores the values of a small matrix for gradients."""
    noise, residual, *rest = tensors
    tree = parts.tree(rest)
    blocks = Blocks(tree, mirrored=True)
    buffer = memory.huge((*residual.shape, residual.shape[-1]), residual)
    _assemble(blocks, noise, buffer, keep)
    factor, info = factorised(buffer)
    if torch.any(info) if info.dim() else info.item():
        _assemble(blocks, noise, buffer, keep=False)
        for start, stop in row_blocks(buffer, CACHED)[1:]:
            buffer[:start, start:stop] = buffer[start:stop, :start].mT
        if buffer.isnan().any():  # stock's error counts all NaNs, and blocks do not compute the diagonal
            buffer.copy_(trees.dense(tree)).diagonal(dim1=-2, dim2=-1).add_(noise)
        factor = psd_safe_cholesky(buffer)  # raises, or warns and adds jitter
    return blocks, factor, torch.linalg.solve_triangular(factor, residual.unsqueeze(-1), upper=False)


def gradients_by(
    state: State, noise: torch.Tensor, wanted: Sequence[bool], inverse_of: Callable[..., torch.Tensor] | None = None
) -> list[torch.Tensor | None]:
    """Return the gradients by noise, residual and the tree's tensors; `inverse_of` may overwrite the factor."""
    blocks, factor, white = state
    a = torch.linalg.solve_triangular(factor.mT, white, upper=True)
    vector = a.squeeze(-1)
    found: list[torch.Tensor | None] = [None] * len(wanted)
    if wanted[1]:
        found[1] = -vector
    if not (wanted[0] or any(wanted[2:])):
        return found
    inverse = (inverse_of or inverted)(factor)
    if wanted[0]:
        by_noise = vector.square().sub_(inverse.diagonal(dim1=-2, dim2=-1))
        if noise.shape[-1] == 1 < vector.shape[-1]:
            by_noise = by_noise.sum(-1, keepdim=True)
        found[0] = by_noise.mul_(0.5)
    if any(wanted[2:]):
        turned, half = a.mT, vector.new_full((), 0.5)
        for start, stop in row_blocks(inverse, CACHED):
            if stop - start == inverse.shape[-1]:
                g = torch.mul(a, turned).sub_(inverse)
            else:
                g = torch.mul(a[start:stop], turned[:, :stop]).sub_(inverse[start:stop, :stop])
            blocks.backward((start, stop), g, half)
        found[2:] = [one if want else None for one, want in zip(blocks.gradients(), wanted[2:], strict=True)]
    return found
