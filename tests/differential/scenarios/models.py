"""BoTorch's models, multitask and Hadamard models, lists: training, posteriors, acquisition, fantasies."""

import gpytorch
import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    UpperConfidenceBound,
    qKnowledgeGradient,
    qLogExpectedImprovement,
)
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.models import ModelListGP
from botorch.sampling import IIDNormalSampler
from builders import normals, points, values
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import LCMKernel, MaternKernel, MultitaskKernel, RBFKernel, RBFKernelGrad, ScaleKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from gpytorch.means import ConstantMeanGrad
from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood
from support import botorch_models, exact_models
from table import See, cases, scenarios
from user_code import Counting, Own

from scenarios.predictions import under
from scenarios.training import trained

BOTORCH = {
    **botorch_models.MODELS,
    "counting": botorch_models.single(likelihood=Counting()),
    "own kernel": botorch_models.with_kernel(lambda: ScaleKernel(Own())),
    "list": lambda: ModelListGP(*(botorch_models.MODELS[kind]() for kind in ("usual", "isotropic"))),
}
KINDS = ["usual", "known noise", "normalised inputs", "scaled", "counting", "own kernel", "two outputs", "categories",
         "list", "tasks"]  # fmt: skip


def built(see: See, kind: str):
    return BOTORCH[kind]().float().to(see.dtype)


def places(see: See, kind: str, *shape: int, seed: int = 1) -> torch.Tensor:
    x = points(see, *shape, seed=seed, d=botorch_models.D)
    return torch.cat((x[..., :1], (x[..., 1:] * 2).round()), -1) if kind == "categories" else x


@scenarios(
    cases(kind=KINDS), cases(kind=["usual", "categories", "scaled"], dtype="float32", kappa=10.0), library="botorch"
)
def fitted(see: See, kind: str):
    """One step of a fit, then posteriors with and without noise."""
    model = built(see, kind)
    mll = (SumMarginalLogLikelihood if kind == "list" else ExactMarginalLogLikelihood)(model.likelihood, model)
    mll.train()
    inputs, targets = model.train_inputs, model.train_targets
    output = model(*inputs)
    loss = -(mll(output, targets).sum() if kind == "list" else mll(output, targets, *inputs).sum())
    see("loss", loss)
    see.grads("gradient", loss, model)
    model.eval()
    x = places(see, kind, 6).requires_grad_(kind != "categories")
    for noisy in (False, True):
        p = model.posterior(x, observation_noise=noisy)
        see(f"type {noisy}", type(p).__name__)
        see(f"mean {noisy}", p.mean)
        see(f"variance {noisy}", p.variance)
        see.grads(f"variance {noisy}", p.variance.sin(), {**dict(model.named_parameters()), "x": x})


@scenarios(
    cases(
        kind=["usual", "known noise", "categories", "counting", "two outputs"],
        what=["samples", "conditioned", "fantasies"],
        library="botorch",
        kappa=10.0,
    )
)
def used(see: See, kind: str, what: str):
    model = built(see, kind).eval()
    x = places(see, kind, 4).requires_grad_(kind != "categories")
    if what == "samples":
        torch.manual_seed(3)
        found = model.posterior(x.unsqueeze(0).expand(3, 4, x.shape[-1])).rsample(torch.Size([2]))
        see("samples", found)
        see.grads("samples", found.sin(), model)
        return
    _ = model.posterior(x).variance
    z = places(see, kind, 2, seed=9).requires_grad_()
    noise = {"noise": torch.full((2, 1), 0.2, dtype=see.dtype)} if kind == "known noise" else {}
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
    cases(
        kind=["usual", "categories"], what=["qLogEI", "LogEI", "UCB", "qLogNEI", "KG"], library="botorch", kappa=100.0
    )
)
def acquired(see: See, kind: str, what: str):
    model, sampler = built(see, kind).eval(), IIDNormalSampler(torch.Size([8]), seed=5)
    q = {"LogEI": 1, "UCB": 1, "KG": 4}.get(what, 2)
    made = {
        "qLogEI": lambda: qLogExpectedImprovement(model, 0.3, sampler),
        "LogEI": lambda: LogExpectedImprovement(model, 0.3),
        "UCB": lambda: UpperConfidenceBound(model, 0.3),
        "qLogNEI": lambda: qLogNoisyExpectedImprovement(model, places(see, kind, 5, seed=8), sampler),
        "KG": lambda: qKnowledgeGradient(model, num_fantasies=2, sampler=IIDNormalSampler(torch.Size([2]), seed=5)),
    }
    with see.attempt("made"):
        acquisition = made[what]()
        x = places(see, kind, 3, q, seed=2).requires_grad_()
        for k in range(2):
            found = acquisition(x + 0.01 * k)
            see(f"value {k}", found)
            see.grads(f"value {k}", found, {"x": x})


class Derivatives(gpytorch.models.ExactGP):
    def __init__(self, x):
        super().__init__(x, torch.stack((values(x), x[:, 0], x[:, 1]), -1), MultitaskGaussianLikelihood(3))
        self.mean_module, self.covar_module = ConstantMeanGrad(), ScaleKernel(RBFKernelGrad(ard_num_dims=2))

    def forward(self, x):
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


OTHER_KERNELS = {
    "lcm": lambda: LCMKernel([RBFKernel(), MaternKernel(1.5)], num_tasks=2, rank=1),
    "kronecker of own": lambda: MultitaskKernel(Own(), num_tasks=2, rank=1),
}


def tasked(see: See, kind: str, m: int = 5):
    """A model of several outputs, its training inputs and test inputs."""
    if kind == "derivatives":
        model, others = Derivatives(points(see, 14)), (points(see, m, seed=1),)
    else:
        of = "kronecker" if kind in OTHER_KERNELS else kind
        model = exact_models.Several(of, 14)
        if kind in OTHER_KERNELS:
            model.covar_module = OTHER_KERNELS[kind]()
        others = exact_models.several_at(of, m)
    others = [t.float().to(see.dtype) if t.is_floating_point() else t for t in others]
    model = model.float().to(see.dtype)
    return model, model.train_inputs, others


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
        model, _, others = tasked(see, kind, m)
        trained(see, model)
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
