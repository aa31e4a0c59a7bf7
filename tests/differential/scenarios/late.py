"""What is read late of a posterior is what it was at its call, with gradients to the parameters of that call."""

from __future__ import annotations

import copy
import pickle

import torch
from builders import points, regression
from gpytorch.mlls import ExactMarginalLogLikelihood
from table import See, cases, scenarios

from scenarios.events import EVENTS, STALE
from scenarios.models import tasked
from scenarios.predictions import under


class Predicts(torch.nn.Module):
    """A model as `functional_call` wants it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


@scenarios(
    cases(kernel=["scaled rbf", "own", "rbf + matern", "rbf + linear", "deep", "features"], m=[7]),
    cases(kernel=["scaled rbf", "deep"], m=[100]),
    cases(kernel="scaled rbf", m=[600]),
    cases(kernel="scaled rbf", m=[1030, 1500], rare=True),
    cases(kernel=["scaled rbf", "own"], m=7, setting=["fast", "attached", "small eager"]),
    cases(kernel=["scaled matern52"], m=[100], n=130),
)
def swapped_parameters(see: See, kernel: str, m: int, setting: str = "defaults", n: int = 22):
    """`functional_call` with parameters that are gone again when the posterior is read."""
    with under(setting):
        model = regression(see, n, kernel).eval()
        wrap, x = Predicts(model), points(see, m, seed=1)
        named = {name: p for name, p in wrap.named_parameters() if p.requires_grad}
        p = torch.func.functional_call(wrap, {name: 1.1 * q for name, q in named.items()}, (x,))
        see.grads("variance", p.variance, named)
        see("variance", p.variance)
        see("mean", p.mean)
        if m <= 100:
            see.grads("covariance", p.covariance_matrix.sin(), named)


@scenarios(
    cases(
        event=[
            "outputscale setter",
            "lengthscale setter",
            "load_state_dict",
            "fused Adam",
            "in place",
            "data copy",
            "noise setter",
            "data set",
            "trained and evaluated",
        ],
        fresh=True,
    ),
    cases(event=["other parameter", "points in place"]),
    cases(event=["outputscale setter", "fused Adam", "in place"], kernel="rbf + linear", fresh=True),
    cases(event=["outputscale setter", "fused Adam", "in place"], kernel="own"),
    cases(event=["outputscale setter", "fused Adam"], m=1030, fresh=True),
    cases(
        event=["initialize", "data assigned", "Adam", "fused AdamW", "bound", "data of the noise"], m=600, fresh=True
    ),
    cases(event=["attribute", "points through NumPy"], m=600),
    cases(event=["outputscale setter", "in place"], setting=["fast", "attached", "small eager"], fresh=True),
    cases(event=["outputscale setter"], setting=["small eager"], kernel="rbf + linear", fresh=True),
    cases(event=["outputscale setter"], setting=["small eager"], kernel=["own", "deep", "weight-normed"]),
    stale="stock's backward pass may see parameters that were changed since; else all is as if read at once",
)
def read_after(see: See, event: str, kernel: str = "scaled rbf", m: int = 9, setting: str = "defaults"):
    with under(setting):
        model = regression(see, 22, kernel).eval()
        p, q = model(points(see, m, seed=1)), model(points(see, m, seed=2))
        noisy, part = model.likelihood(model(points(see, 5, seed=3))), p[..., 1:4]

        def read():
            see("variance", p.variance)
            see("mean", p.mean)
            see("part", part.variance)
            see("part's covariance", part.covariance_matrix)
            see("covariance", q.covariance_matrix[:9, :9])
            see("noisy", noisy.variance)
            with see.attempt("gradient"):
                see.grads("variance", p.variance.sin(), model)

        if not see.first:
            read()
        EVENTS[event](see, model)
        if see.first:
            read()


def _noisy(model, prior):
    return model.likelihood(prior).log_prob(model.train_targets)


def _marginal(model, prior):
    return ExactMarginalLogLikelihood(model.likelihood, model)(prior, model.train_targets)


PRIORS = {
    "covariance": lambda model, prior: prior.covariance_matrix,
    "product": lambda model, prior: prior.lazy_covariance_matrix.matmul(torch.ones_like(prior.loc)),
    "noisy covariance": lambda model, prior: model.likelihood(prior).covariance_matrix,
    "marginal": _marginal,
    "density": _noisy,
    "variance": lambda model, prior: prior.variance,
    "part": lambda model, prior: prior.lazy_covariance_matrix[..., :3, :3].to_dense(),
    "sample": lambda model, prior: prior.rsample(base_samples=torch.ones_like(prior.mean)),
}


@scenarios(
    cases(first=list(PRIORS), event="Adam"),
    cases(first=["covariance", "marginal", "variance", "sample"], event="data assigned"),
    cases(first=["covariance", "density", "part"], event=["Adam"], after="density"),
    cases(first=list(PRIORS)[::2], event="Adam", likelihood="fixed"),
    cases(first=["product", "marginal", "variance"], event="data assigned", likelihood="fixed", after="density"),
    cases(first=["covariance", "marginal", "density", "variance"], event="Adam", of=["batch", "kronecker"]),
    cases(first=["covariance", "variance"], event="Adam", of="batch", likelihood="fixed"),
)
def a_prior_after_a_step(
    see: See, first: str, event: str, after: str = "marginal", of: str = "one", likelihood: str = "gaussian"
):
    """A prior that is read after its density and a step: what is read first may leave something for the next."""
    if of == "kronecker":
        model, inputs, _ = tasked(see, of)
    else:
        model = regression(see, 40, "scaled matern32", likelihood, batch=(2,) if of == "batch" else ())
        inputs = model.train_inputs
    prior = model.train()(*inputs)
    PRIORS[after](model, prior).sum().neg().backward(retain_graph=True)
    EVENTS[event](see, model)
    for k, name in enumerate([first, *PRIORS]):
        see(f"{name} {k}", PRIORS[name](model, prior))


LATER = {
    "kernel removed": lambda model: delattr(model, "covar_module"),
    "kernel deep changed": lambda model: model.covar_module.net[0].weight.data.mul_(2.0),
    "weight-normed": lambda model: model.covar_module.net[0].weight_g.data.mul_(2.0),
    "attribute": lambda model: setattr(model.covar_module.base_kernel, "scale", torch.tensor(0.1)),
    "buffer": lambda model: model.covar_module.base_kernel.shift.mul_(5.0),
    "context": lambda model: setattr(model.covar_module, "context", torch.full((1,), 4.0)),
    "float": lambda model: model.float(),
}
OF = {
    "kernel deep changed": "deep",
    "weight-normed": "weight-normed",
    "attribute": "attribute",
    "buffer": "buffered",
    "context": "hyper",
}


@scenarios(cases(change=list(LATER), m=[7, 600]))
def changed_kernels(see: See, change: str, m: int):
    model = regression(see, 22, OF.get(change, "scaled rbf")).eval()
    p = model(points(see, m, seed=1))
    with torch.no_grad():
        LATER[change](model)
    see("variance", p.variance)
    see("covariance", p.covariance_matrix[:9, :9])


@scenarios(cases(points_then=["in place", "grown"], m=[7, 600]))
def changed_points(see: See, points_then: str, m: int):
    """The test points of a posterior change before it is read."""
    model = regression(see, 22).eval()
    x = points(see, m, seed=1)
    with torch.no_grad():
        p = model(x)
        x.mul_(0.1) if points_then == "in place" else x.resize_(m + 3, 2).fill_(0.5)
    see("variance", p.variance)
    see("covariance", p.covariance_matrix[:9, :9])


COPIES = {"pickle": lambda it: pickle.loads(pickle.dumps(it)), "deepcopy": copy.deepcopy}


@scenarios(
    cases(how=list(COPIES), of=["model", "read model"], kernel=["scaled rbf", "rbf + linear"]),
    cases(how=list(COPIES), of=["posterior", "read posterior", "covariance"]),
    cases(how=list(COPIES), of=["read model"], likelihood=["fixed", "counting"]),
    stale="what a model out of a pickle was made of is not known, so that it predicts as a fresh one",
)
def copies(see: See, how: str, of: str, kernel: str = "scaled rbf", likelihood: str = "gaussian"):
    model = regression(see, 22, kernel, likelihood).eval()
    x = points(see, 8, seed=1)
    if of.endswith("model"):
        if of == "read model":
            with torch.no_grad():
                see("before", model(x).variance)
        other = COPIES[how](model)
        see.posterior("copy", other(x))
        see.posterior("original", model(x))
        return
    with torch.no_grad():
        p = model(x)
    if of == "read posterior":
        see("before", p.variance)
    with see.attempt("copied"):
        if of == "covariance":
            see("dense", COPIES[how](p.lazy_covariance_matrix).to_dense())
        else:
            see.posterior("copy", COPIES[how](p))


@scenarios(
    cases(how=list(COPIES), event=["lengthscale setter", "data copy", "in place", "points in place"]),
    cases(how="pickle", event="outputscale setter", setting=["fast", "attached"]),
    stale=STALE,
)
def copied_between_changes(see: See, how: str, event: str, setting: str = "defaults"):
    """A pickle holds stock's stale caches too: the copy's mean is that one or a fresh one, nothing between."""
    with under(setting):
        model, x = regression(see, 22).eval(), points(see, 8, seed=1)
        if see.first:
            with torch.no_grad():
                _ = model(x).variance
        EVENTS[event](see, model)
        if see.first:
            with torch.no_grad():
                _ = model(x).variance
        other = COPIES[how](model)
        if see.first:
            with torch.no_grad():
                _ = other(x).variance
        EVENTS["outputscale setter"](see, other)
        see.posterior("copy", other(x))
