"""What is read late of a posterior is what it was at its call, with gradients to the parameters of that call."""

import copy
import pickle

import torch
from builders import points, regression
from gpytorch.mlls import ExactMarginalLogLikelihood
from table import See, cases, scenarios

from scenarios.events import ALL, EVENTS, STALE, base, of_kernels
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


LATE = {"kernel removed": lambda see, m: delattr(m, "covar_module"), "float": lambda see, m: m.float()}
SOME = ["outputscale setter", "fused Adam", "in place", "load_state_dict", "data copy", "noise setter"]


@scenarios(
    cases(event=[*SOME, "lengthscale setter", "data set", "trained and evaluated"], fresh=True),
    cases(event=["other parameter", "points in place"]),
    cases(event=SOME[:3], kernel="rbf + linear", fresh=True),
    cases(event=SOME[:3], kernel="own"),
    cases(event=SOME[:2], m=1030, fresh=True),
    cases(
        event=["initialize", "data assigned", "Adam", "fused AdamW", "bound", "data of the noise"], m=600, fresh=True
    ),
    cases(event=["attribute", "points through NumPy"], m=600),
    cases(event=["outputscale setter", "in place"], setting=["fast", "attached", "small eager"], fresh=True),
    cases(event="outputscale setter", setting="small eager", kernel="rbf + linear", fresh=True),
    cases(event="outputscale setter", setting="small eager", kernel=["own", "deep", "weight-normed"]),
    of_kernels("network", "normed weights", "scale assigned", "buffer in place", "context", m=[9, 600]),
    cases(event=list(LATE), m=[9, 600]),
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
        (ALL | LATE)[event](see, model)
        if see.first:
            read()


PRIORS = {
    "covariance": lambda model, prior: prior.covariance_matrix,
    "product": lambda model, prior: prior.lazy_covariance_matrix.matmul(torch.ones_like(prior.loc)),
    "noisy covariance": lambda model, prior: model.likelihood(prior).covariance_matrix,
    "marginal": lambda model, prior: ExactMarginalLogLikelihood(model.likelihood, model)(prior, model.train_targets),
    "density": lambda model, prior: model.likelihood(prior).log_prob(model.train_targets),
    "variance": lambda model, prior: prior.variance,
    "part": lambda model, prior: prior.lazy_covariance_matrix[..., :3, :3].to_dense(),
    "sample": lambda model, prior: prior.rsample(base_samples=torch.ones_like(prior.mean)),
}


def _bound(see, model):
    base(model).raw_lengthscale_constraint.upper_bound = torch.tensor(9.0)


WRITTEN = {
    "bound assigned": _bound,
    "dimensions": lambda see, m: setattr(base(m), "active_dims", None),
    "dimensions in place": lambda see, m: base(m).active_dims.fill_(1),
    "no forward": lambda see, m: setattr(base(m), "forward", None),
}
CHANGED = ["transform", "smoothness", "bound", "constraint", "other parameter", *WRITTEN]


@scenarios(
    cases(first=list(PRIORS), event="Adam"),
    cases(first=["covariance", "density"], event=CHANGED, kernel="active matern52", hidden=[False, True], kappa=100.0),
    cases(first="covariance", event=CHANGED[:4], kernel="active matern52", no_graph=True, kappa=100.0),
    cases(first=["covariance", "marginal", "variance", "sample"], event="data assigned"),
    cases(first=["covariance", "density", "part"], event=["Adam"], after="density"),
    cases(first=list(PRIORS)[::2], event="Adam", likelihood="fixed"),
    cases(first=["product", "marginal", "variance"], event="data assigned", likelihood="fixed", after="density"),
    cases(first=["covariance", "marginal", "density", "variance"], event="Adam", of=["batch", "kronecker"]),
    cases(first=["covariance", "variance"], event="Adam", of="batch", likelihood="fixed"),
)
def a_prior_after_a_step(
    see, first, event, after="marginal", of="one", likelihood="gaussian", kernel="scaled matern32", no_graph=False,
    hidden=False,
):  # fmt: skip
    """A prior that is read after its density and a change: what is read first may leave something for the next.

    A kernel that another change makes unknown may hide the change from who looks at the model again.
    """
    if of == "kronecker":
        model, inputs, _ = tasked(see, of)
    else:
        model = regression(see, 40, kernel, likelihood, batch=(2,) if of == "batch" else ())
        inputs = model.train_inputs
    with torch.set_grad_enabled(not no_graph):
        prior = model.train()(*inputs)
        found = PRIORS[after](model, prior)
    if not no_graph:
        found.sum().neg().backward(retain_graph=True)
    (EVENTS | WRITTEN)[event](see, model)
    if hidden:
        WRITTEN["no forward"](see, model)
    for k, name in enumerate([first, *PRIORS]):
        see(f"{name} {k}", PRIORS[name](model, prior))


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
    cases(how=list(COPIES), kernel=["scaled rbf", "rbf + linear"]),
    cases(how=list(COPIES), likelihood=["fixed", "counting"]),
    stale=STALE,
)
def copied_models(see, how, kernel="scaled rbf", likelihood="gaussian"):
    """A pickle holds stock's stale caches too: the copy's mean is that one or a fresh one, the original's as ever."""
    model, x = regression(see, 22, kernel, likelihood).eval(), points(see, 8, seed=1)
    with torch.no_grad():
        _ = model(x).variance if see.first else None
        other = COPIES[how](model)
        _ = other(x).variance if see.first else None
    EVENTS["outputscale setter"](see, other)
    see.posterior("copy", other(x))
    see.posterior("original", model(x))
