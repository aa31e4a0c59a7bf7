"""Marginal likelihoods that the tests of densities share, by which candidates, and their derivatives."""

import gpytorch
import torch
from gpytorch.kernels import MultitaskKernel, PiecewisePolynomialKernel, RBFKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, MultitaskMean
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from support.outcomes import count

import autokern
from autokern.density.gaussian import dense

N, D = 12, 4
WAYS = {
    "objective": {"objective": "arrays"},
    "arrays": {"exact_log_prob": "arrays", "objective": "stock"},
    "fused": {"exact_log_prob": "fused", "objective": "stock"},
    "dense": {"dense_log_prob": "arrays"},
    "tasks": {"task_log_prob": "arrays"},
    "stock": {"exact_log_prob": "stock", "objective": "stock"},
}


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel, mean):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module, self.features = mean, kernel, torch.nn.Identity()

    def forward(self, x):
        x = self.features(x)
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x.sin()), self.covar_module(x))


class Deep(Model):
    def __init__(self, *args):
        super().__init__(*args)
        torch.manual_seed(1)
        self.features = torch.nn.Sequential(torch.nn.Linear(D, 4), torch.nn.Tanh(), torch.nn.Linear(4, D))


def made(kernel, mean=None, likelihood=None, n=N, dtype=torch.float64, batch=(), kind=Model):
    """A marginal likelihood whose hyperparameters are off their defaults."""
    generator = torch.Generator().manual_seed(n)
    x = torch.rand(n, D, generator=generator, dtype=torch.float64)
    y = x.sum(-1).cos() + 0.1 * torch.randn(*batch, n, generator=generator, dtype=torch.float64)
    likelihood = likelihood or GaussianLikelihood(batch_shape=torch.Size(batch))
    model = kind(x.to(dtype), y.to(dtype), likelihood, kernel, mean or ConstantMean(batch_shape=torch.Size(batch)))
    mll = ExactMarginalLogLikelihood(likelihood, model.to(dtype)).train()
    with torch.no_grad():
        for p in mll.parameters():
            p.add_(0.3 * torch.rand(p.shape, generator=generator).to(dtype))
    return mll


class Tasks(Model):
    def forward(self, x):
        return gpytorch.distributions.MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


def of_tasks(kernel=None, likelihood=None, mean=None, tasks=3, n=11, kind=Tasks):
    """The same of several tasks at each point."""
    kernel = kernel or MultitaskKernel(RBFKernel(ard_num_dims=D), num_tasks=tasks, rank=1)
    likelihood = likelihood or MultitaskGaussianLikelihood(num_tasks=tasks)
    mll = made(kernel, MultitaskMean(mean or ConstantMean(), num_tasks=tasks), likelihood, n, kind=kind)
    y = mll.model.train_targets
    mll.model.set_train_data(targets=torch.stack([(y + k).sin() for k in range(tasks)], -1), strict=False)
    return mll


def of(way, n=N):
    """A density that a way serves: of a matrix without a formula, of several tasks."""
    if way == "tasks":
        return of_tasks(tasks=2, n=n)
    return made(PiecewisePolynomialKernel(0, ard_num_dims=D) if way == "dense" else RBFKernel(), n=n)


def without_factor(kernel):
    """One whose covariance is not positive definite."""
    mll = made(kernel, likelihood=FixedNoiseGaussianLikelihood(torch.full((N,), 1e-4, dtype=torch.float64)))
    mll.likelihood.noise_covar.noise = torch.full((N,), -2.0, dtype=torch.float64)
    return mll


def value_of(mll):
    return mll(mll.model(*mll.model.train_inputs), mll.model.train_targets)


def by(way):
    return autokern.using(force=WAYS[way])


def weighted(values):
    return (values * torch.linspace(1, 2, values.numel(), dtype=values.dtype).view(values.shape)).sum()


def of_both_orders(loss, parameters):
    """Gradients, and a second derivative of every parameter."""
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    total = sum((g * (k + 1)).sum() for k, g in enumerate(first))
    return [*(g.detach() for g in first), *torch.autograd.grad(total, parameters, allow_unused=True)]


def derivatives(mll, second=True):
    """Values, gradients by backward, and those of both orders, of a weighted sum for a batch."""
    values = value_of(mll)
    parameters = [p for p in mll.parameters() if p.requires_grad]
    mll.zero_grad()
    weighted(values).backward(retain_graph=True)
    found = [values.detach(), *(None if p.grad is None else p.grad.clone() for p in parameters)]
    return [*found, *of_both_orders(weighted(values), parameters)] if second else found


def truth(mll):
    """The same by explicit matrices alone, all summands and factors apart."""
    x, y = mll.model.features(mll.model.train_inputs[0]), mll.model.train_targets
    chosen = mll.model.covar_module.active_dims
    k = dense(mll.model.covar_module, x if chosen is None else x[:, chosen])
    k = k + mll.likelihood.noise * torch.eye(len(y), dtype=y.dtype)
    mean, normal = mll.model.mean_module(x.sin()), torch.distributions.MultivariateNormal
    value = normal(mean, k).log_prob(y) / len(y)
    if isinstance(mll, LeaveOneOutPseudoLikelihood):  # each given the others: the joint density over theirs
        others = [torch.tensor([j for j in range(len(y)) if j != i]) for i in range(len(y))]
        value = value * len(y) - sum(normal(mean[o], k[o][:, o]).log_prob(y[o]) for o in others) / len(y)
    parameters = list(mll.parameters())
    found = of_both_orders(value, parameters)
    return [value.detach(), *found[: len(parameters)], *found]


def agree(found, expected, both=False, **tolerances):
    """The same tensors; of none where there is none, unless only those of both sides are to be compared."""
    for one, other in zip(found, expected, strict=True):
        assert both or (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, **tolerances)


def served(way):
    return count(*next(iter(WAYS[way].items())))
