"""Shared by the ops: keys and problems of matrices and kernels; matrices, kernels and small exact models as samples."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import AdditiveKernel, InducingPointKernel, Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.models import ExactGP
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.priors import LogNormalPrior

from autokern.core.errors import caught
from autokern.core.problem import INDUCING, Problem
from autokern.kernels import tree as trees
from autokern.kernels.embedded import Embedded
from autokern.kernels.family import family
from autokern.kernels.tree import Node
from autokern.system import host

EPS = {"float32": 2.0**-23, "float64": 2.0**-52}
_DTYPES = {torch.float32: "float32", torch.float64: "float64"}
CG_ITERATIONS = 11
"""The smallest number of iterations of the library's conjugate gradients; `_candidates` has counts of real models."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


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
    (x1, x2, *rhs), names = tensors, sorted(trees.leaves(node))
    parameters = list((*kernel.shapes, *kernel.weights) if isinstance(kernel, Embedded) else kernel.parameters())
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


def iterates(problem: Problem) -> bool:
    return "cg" in problem.words


def families(problem: Problem) -> list[str]:
    """Return the kernel families of a problem: the first word of its variant."""
    return problem.words[0].split("+")


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


def kernel_of(problem: Problem, generator: torch.Generator) -> Kernel:
    """Return a sum of scaled kernels of the variant's families, with ARD unless the variant has the word `iso`."""
    batch = torch.Size([problem.batch]) if problem.batch > 1 else torch.Size()
    options = {"batch_shape": batch, **({} if "iso" in problem.words else {"ard_num_dims": problem.d})}

    def scaled(name: str) -> Kernel:
        of = family(name)
        base = (of.make or of.kernels[0])(**options)
        drawn = torch.rand(base.lengthscale.shape, generator=generator, device="cpu")
        base.lengthscale = drawn.to(base.lengthscale.device) * 0.5 + 0.75 * problem.d**0.5
        return ScaleKernel(base, batch_shape=batch)

    total = functools.reduce(operator.add, map(scaled, families(problem)))
    return total.to(dtype=getattr(torch, problem.dtype), device=device_of(problem))


def trained(problem: Problem, generator: torch.Generator) -> Any:
    """Return the strategy of a model of `n` points in `d` dimensions; where stock iterates, trials have no caches."""
    like: dict[str, Any] = {"dtype": getattr(torch, problem.dtype), "device": device_of(problem)}
    kernel = ScaleKernel(MaternKernel(2.5) if "line" in problem.words else RBFKernel(ard_num_dims=problem.d))
    kernel.base_kernel.lengthscale = 0.5 * problem.d**0.5
    likelihood = GaussianLikelihood()
    likelihood.noise = 0.01
    graph = "theta" in problem.grad.split("/")
    for module in (kernel, likelihood):
        module.to(**like).eval().requires_grad_(graph and module is kernel)  # caches detach the noise
    single = problem.replace(batch=1)
    x = random_matrix(single, generator, problem.n, problem.d)
    y = x.sum(-1).sin() + 0.1 * random_matrix(single, generator, problem.n)
    prior = MultivariateNormal(torch.zeros_like(y), LazyEvaluatedKernelTensor(x, x, kernel=kernel))
    strategy = DefaultPredictionStrategy([x], prior, y, likelihood)
    strategy.cold = iterates(problem)
    return strategy


class _Model(ExactGP):  # type: ignore[misc]
    def __init__(self, x: torch.Tensor, y: torch.Tensor, kernel: Kernel) -> None:
        batch = y.shape[:-1]
        super().__init__(x, y, GaussianLikelihood(noise_prior=LogNormalPrior(-4.0, 1.0), batch_shape=batch))
        self.mean_module, self.covar_module = ConstantMean(batch_shape=batch), kernel

    def forward(self, x: torch.Tensor) -> MultivariateNormal:
        mean = self.mean_module(x)
        covariance = self.covar_module(x)
        return MultivariateNormal(mean, covariance)


def objective_model(problem: Problem, generator: torch.Generator, priors: bool = True) -> ExactGP:
    """Return a model in training mode, of `n` points in `d` dimensions, possibly batched, with BoTorch's priors."""
    x = random_matrix(problem, generator, problem.n, problem.d)
    y = x.sum(-1).sin() + 0.1 * random_matrix(problem, generator, problem.n)
    kernel = kernel_of(problem, generator)
    scales = kernel.kernels if type(kernel) is AdditiveKernel else (kernel,)
    for scaled in scales if priors else ():
        base = scaled.base_kernel
        prior = LogNormalPrior(2**0.5 + 0.5 * math.log(problem.d), 3**0.5)
        base.register_prior("lengthscale_prior", prior, base._lengthscale_param, base._lengthscale_closure)
    model = _Model(x, y, kernel).to(x)
    if INDUCING in problem.words:
        model.covar_module = InducingPointKernel(kernel, x[: problem.m].clone(), model.likelihood)
    return model


def prior_of(model: ExactGP) -> MultivariateNormal:
    """Return a model's prior, lazy even if another thread's kernel call makes gpytorch evaluate eagerly."""
    (x,) = model.train_inputs
    return MultivariateNormal(model.mean_module(x), LazyEvaluatedKernelTensor(x, x, kernel=model.covar_module))
