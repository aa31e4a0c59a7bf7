"""BoTorch's models, multitask and Hadamard models, lists, classifiers: training, posteriors, acquisition, fantasies."""

from __future__ import annotations

import warnings

import gpytorch
import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    UpperConfidenceBound,
    qKnowledgeGradient,
    qLogExpectedImprovement,
)
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.models import MixedSingleTaskGP, ModelListGP, MultiTaskGP, SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.sampling import IIDNormalSampler
from builders import noises, normals, points, values
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import (
    IndexKernel,
    LCMKernel,
    MaternKernel,
    MultitaskKernel,
    RBFKernel,
    RBFKernelGrad,
    ScaleKernel,
)
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, ConstantMeanGrad, MultitaskMean
from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood
from table import See, cases, count, scenarios
from user_code import Counting, Own, Regression

from scenarios.predictions import under


def single(see: See, kind: str, n: int = 17):
    x = points(see, n)
    y = values(x).unsqueeze(-1)
    options = {
        "plain": {},
        "noise given": {"train_Yvar": noises(n).to(see.dtype).unsqueeze(-1)},
        "transformed": {"input_transform": Normalize(2)},
        "matern": {"covar_module": ScaleKernel(MaternKernel(2.5, ard_num_dims=2))},
        "counting": {"likelihood": Counting()},
        "own kernel": {"covar_module": ScaleKernel(Own())},
    }
    if kind == "two outputs":
        y = torch.cat((y, -2 * y), -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "mixed":
            x = torch.cat((x, (x[:, :1] * 3).floor()), -1)
            return MixedSingleTaskGP(x, y, cat_dims=[-1], outcome_transform=None).to(see.dtype)
        if kind == "list":
            return ModelListGP(single(see, "plain"), single(see, "matern", 13))
        more = options.get(kind, {})
        made = SingleTaskGP(x, y, **more, outcome_transform=None if kind != "standardised" else Standardize(1))
    return made.to(see.dtype)


def places(see: See, kind: str, *shape: int, seed: int = 1) -> torch.Tensor:
    x = points(see, *shape, seed=seed)
    return torch.cat((x, (x[..., :1] * 3).floor()), -1) if kind == "mixed" else x


KINDS = [
    "plain",
    "noise given",
    "transformed",
    "standardised",
    "matern",
    "counting",
    "own kernel",
    "two outputs",
    "mixed",
    "list",
]


@scenarios(cases(kind=KINDS), cases(kind=["plain", "mixed", "matern"], dtype="float32", kappa=10.0), library="botorch")
def fitted(see: See, kind: str):
    """One step of a fit, then posteriors with and without noise."""
    model = single(see, kind)
    mll = (SumMarginalLogLikelihood if kind == "list" else ExactMarginalLogLikelihood)(model.likelihood, model)
    mll.train()
    inputs, targets = model.train_inputs, model.train_targets
    output = model(*inputs)
    loss = -(mll(output, targets).sum() if kind == "list" else mll(output, targets, *inputs).sum())
    see("loss", loss)
    see.grads("gradient", loss, model)
    model.eval()
    x = places(see, kind, 6).requires_grad_(kind != "mixed")
    for noisy in (False, True):
        p = model.posterior(x, observation_noise=noisy)
        see(f"type {noisy}", type(p).__name__)
        see(f"mean {noisy}", p.mean)
        see(f"variance {noisy}", p.variance)
        see.grads(f"variance {noisy}", p.variance.sin(), {**dict(model.named_parameters()), "x": x})


@scenarios(
    cases(
        kind=["plain", "noise given", "mixed", "counting", "two outputs"],
        what=["samples", "conditioned", "fantasies"],
        library="botorch",
        kappa=10.0,
    )
)
def used(see: See, kind: str, what: str):
    model = single(see, kind).eval()
    x = places(see, kind, 4).requires_grad_(kind != "mixed")
    if what == "samples":
        torch.manual_seed(3)
        found = model.posterior(x.unsqueeze(0).expand(3, 4, x.shape[-1])).rsample(torch.Size([2]))
        see("samples", found)
        see.grads("samples", found.sin(), model)
        return
    _ = model.posterior(x).variance
    z = places(see, kind, 2, seed=9).requires_grad_()
    noise = {"noise": torch.full((2, 1), 0.2, dtype=see.dtype)} if kind == "noise given" else {}
    if what == "conditioned":
        y = values(z.detach()).unsqueeze(-1)
        other = model.condition_on_observations(z, y.expand(2, 2) if kind == "two outputs" else y, **noise)
    else:
        other = model.fantasize(z, IIDNormalSampler(torch.Size([3]), seed=1))
    p = other.posterior(x)
    see("mean", p.mean)
    see("variance", p.variance)
    see.grads("mean", p.mean.sin(), {"z": z, "x": x})
    see.grads("variance", p.variance.sin(), {"z": z, "x": x})


@scenarios(
    cases(kind=["plain", "mixed"], what=["qLogEI", "LogEI", "UCB", "qLogNEI", "KG"], library="botorch", kappa=100.0)
)
def acquired(see: See, kind: str, what: str):
    model = single(see, kind) if kind != "list of one" else ModelListGP(single(see, "plain"))
    model.eval()
    kind = kind if kind == "mixed" else "plain"
    sampler = IIDNormalSampler(torch.Size([8]), seed=5)
    q = 1 if what in ("LogEI", "UCB") else 2
    made = {
        "qLogEI": lambda: qLogExpectedImprovement(model, 0.3, sampler),
        "LogEI": lambda: LogExpectedImprovement(model, 0.3),
        "UCB": lambda: UpperConfidenceBound(model, 0.3),
        "qLogNEI": lambda: qLogNoisyExpectedImprovement(model, places(see, kind, 5, seed=8), sampler),
        "KG": lambda: qKnowledgeGradient(model, num_fantasies=2, sampler=IIDNormalSampler(torch.Size([2]), seed=5)),
    }
    with see.attempt("made"):
        acquisition = made[what]()
        x = places(see, kind, 3, q + (2 if what == "KG" else 0), seed=2).requires_grad_()
        for k in range(2):
            found = acquisition(x + 0.01 * k)
            see(f"value {k}", found)
            see.grads(f"value {k}", found, {"x": x})


class Multitask(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = MultitaskMean(ConstantMean(), num_tasks=2), kernel

    def forward(self, x):
        count("forward")
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


class Independent(Regression):
    def forward(self, x):
        return MultitaskMultivariateNormal.from_batch_mvn(super().forward(x))


class Hadamard(Regression):
    def forward(self, x, i):
        count("forward")
        covariance = self.covar_module(x).mul(self.task_module(i))
        return MultivariateNormal(self.mean_module(x), covariance)


class Derivatives(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = ConstantMeanGrad(), ScaleKernel(RBFKernelGrad(ard_num_dims=2))

    def forward(self, x):
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


def tasked(see: See, kind: str, m: int = 5):
    """A model of several outputs, its training inputs and test inputs."""
    x, z = points(see, 14), points(see, m, seed=1)
    if kind == "hadamard":
        i, j = (torch.arange(14) % 2).unsqueeze(-1), (torch.arange(m) % 2).unsqueeze(-1)
        model = Hadamard((x, i), values(x), GaussianLikelihood(), ConstantMean(), ScaleKernel(RBFKernel()))
        model.task_module = IndexKernel(num_tasks=2, rank=1)
        torch.nn.init.constant_(model.task_module.covar_factor, 0.7)
        return model.to(see.dtype), (x, i), (z, j)
    if kind == "derivatives":
        y = torch.stack((values(x), x[:, 0], x[:, 1]), -1)
        return Derivatives(x, y, MultitaskGaussianLikelihood(3)).to(see.dtype), (x,), (z,)
    y = torch.stack((values(x), -x[:, 0]), -1)
    if kind == "independent":
        two = torch.Size([2])
        mean, kernel = ConstantMean(batch_shape=two), ScaleKernel(RBFKernel(batch_shape=two), batch_shape=two)
        return Independent(x, y, MultitaskGaussianLikelihood(2), mean, kernel).to(see.dtype), (x,), (z,)
    kernels = {
        "kronecker": lambda: MultitaskKernel(RBFKernel(), num_tasks=2, rank=1),
        "lcm": lambda: LCMKernel([RBFKernel(), MaternKernel(1.5)], num_tasks=2, rank=1),
        "kronecker of own": lambda: MultitaskKernel(Own(), num_tasks=2, rank=1),
    }
    model = Multitask(x, y, MultitaskGaussianLikelihood(2), kernels[kind]())
    for name, p in model.named_parameters():
        if "covar_factor" in name:
            torch.nn.init.constant_(p, 0.6)
    return model.to(see.dtype), (x,), (z,)


@scenarios(
    cases(
        kind=["hadamard", "kronecker", "independent", "lcm", "kronecker of own", "derivatives"],
        setting=["defaults", "fast", "attached"],
        kappa=10.0,
    ),
    cases(kind=["hadamard", "kronecker", "independent"], m=301, kappa=10.0),
    cases(kind=["hadamard", "kronecker"], dtype="float32", kappa=10.0),
)
def several_outputs(see: See, kind: str, setting: str = "defaults", m: int = 5):
    with under(setting):
        model, inputs, others = tasked(see, kind, m)
        model.train()
        loss = -ExactMarginalLogLikelihood(model.likelihood, model)(model(*inputs), model.train_targets)
        see("loss", loss)
        see.grads("gradient", loss, model)
        p = model.eval()(*others)
        see.posterior("posterior", p)
        see.grads("variance", p.variance.sin(), model)
        see("sample", p.rsample(base_samples=normals(see, *p.mean.shape)))
        see.posterior("noisy", model.likelihood(model(*others), *others[1:]))
        part = model(*others)[2:4] if kind == "hadamard" else model(*others)[..., 2:4, :]
        see.posterior("part", part)


@scenarios(
    cases(kind=["hadamard", "kronecker", "independent"], what=["changed", "fantasy"]),
    stale="stock keeps the caches of the mean: those, or a fresh model's",
)
def several_outputs_after(see: See, kind: str, what: str):
    model, _, others = tasked(see, kind)
    model.eval()
    if see.first or what == "fantasy":
        _ = model(*others).variance
    if what == "changed":
        model.likelihood.raw_noise.data.add_(1.0)
        next(p for n, p in model.named_parameters() if "raw_lengthscale" in n).data.sub_(1.0)
        see.posterior("then", model(*others))
        return
    with see.attempt("fantasy"):
        y = torch.ones(5, dtype=see.dtype) if kind == "hadamard" else torch.ones(5, 2, dtype=see.dtype)
        see.posterior("then", model.get_fantasy_model(list(others), y)(*others))


@scenarios(library="botorch")
def multi_task_gp(see: See):
    x = torch.cat((points(see, 16), (torch.arange(16) % 2).to(see.dtype).unsqueeze(-1)), -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(2)
        model = MultiTaskGP(x, values(x).unsqueeze(-1), task_feature=-1, outcome_transform=None).to(see.dtype)
    p = model.eval().posterior(points(see, 5, seed=1))
    see("mean", p.mean)
    see("variance", p.variance)
    see.grads("variance", p.variance.sin(), model)
