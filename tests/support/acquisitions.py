"""Small models and acquisition functions as BoTorch's optimiser evaluates them: again and again, from arrays."""

import functools

import botorch.generation.gen as gen
import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.models import KroneckerMultiTaskGP, ModelListGP, SingleTaskGP
from botorch.sampling import SobolQMCNormalSampler

import autokern

DOUBLE = torch.float64
SAMPLER = functools.partial(SobolQMCNormalSampler, torch.Size([16]), seed=1)


def points(n=10, d=2, dtype=DOUBLE, seed=0):
    return torch.rand(n, d, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def single(dtype=DOUBLE, n=10, **options):
    x = points(n, dtype=dtype)
    return noisy(SingleTaskGP(x, (3 * x).sin().sum(-1, keepdim=True), **options))


def noisy(model):
    """Let a model that is not fitted have a covariance that is well conditioned."""
    model.likelihood.noise = 0.1
    return model.eval()


def several():
    """Two models, of which the second is of a wilder function."""
    return ModelListGP(*(noisy(SingleTaskGP(points(), (k * points()).cos().sum(-1, keepdim=True))) for k in (2, 3)))


def kronecker():
    return noisy(KroneckerMultiTaskGP(points(8), torch.stack([points(8).sum(-1), points(8).prod(-1)], -1)))


def by_stock():
    """An order: no replay."""
    return autokern.using(force={"objective": "stock", "posterior": "stock"})


def improvement(model=None, best_f=0.3, sampler=None, **options):
    """The logarithm of an expected improvement, by samples."""
    return qLogExpectedImprovement(model or single(), best_f, sampler or SAMPLER(), **options)


def wrapper(acquisition, q, d=2, dtype=DOUBLE, sets=4):
    """Return BoTorch's function of arrays as an optimiser calls it, with the loss that `gen_candidates_scipy` makes."""

    def closed(acquisition_function):
        def f(x):
            return -acquisition_function(x)

        f.__module__ = gen.__name__
        return f

    call, f = gen._get_f_np_wrapper(torch.Size([sets, q, d]), torch.device("cpu"), dtype, True), closed(acquisition)
    return lambda x, rows=None: call(x, f, None, rows)


def asked(call, seeds, q=1):
    return [call(points(4, 2 * q, seed=seed).numpy(), [0, 1, 2, 3]) for seed in seeds]
