"""Marginal likelihoods and their gradients: models, likelihoods, sizes, ways to differentiate."""

import gpytorch
import torch
from builders import FOREIGN, GRAPHLESS, LIKELIHOODS, PLAIN, STRUCTURED, SUMS, normals, points, regression, values
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from table import See, cases, scenarios
from torch.utils.checkpoint import checkpoint

CG = "stock's conjugate gradients end at a tolerance of 1 and estimate the log determinant from random probes"


def loss_of(model, x=None, y=None):
    mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
    return -mll(model(*(model.train_inputs if x is None else (x,))), model.train_targets if y is None else y)


def trained(see, model, name=""):
    loss = loss_of(model)
    see(f"{name}loss", loss)
    if loss.requires_grad:
        see.grads(f"{name}gradient", loss.sin() if loss.dim() else loss, model)
    return loss


def descended(loss, model, rate):
    """Take a step of gradient descent."""
    loss.sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(rate * p.grad)
                p.grad = None


@scenarios(
    cases(kernel=[*PLAIN, *SUMS, *STRUCTURED, *FOREIGN, "rbf", "features", "attribute", "rff"]),
    cases(kernel="inducing", kappa=100.0),
    cases(kernel=["scaled rbf", "scaled matern32", "features", "rbf + linear"], dtype="float32"),
    cases(kernel="scaled rbf", mean=["zero", "linear mean", "own mean"]),
    cases(kernel="scaled matern52", likelihood=[one for one in LIKELIHOODS if one != "gaussian"]),
    cases(kernel="own", likelihood=["counting", "fixed"]),
    cases(kernel="scaled rbf", likelihood="counting", dtype="float32"),
    cases(kernel=["scaled rbf", "scaled matern52"], n=[1, 2, 130]),
    cases(kernel=["scaled rbf", "own"], n=0),
    cases(kernel=["scaled rbf", "rbf + matern"], n=[60, 130], dtype="float32"),
    cases(kernel="scaled rbf", n=600, most=5),
    cases(kernel="scaled rbf", n=820, exact=CG, threads=2, most=5),
    cases(kernel="own", n=820, rare=True, exact=CG, most=5),
    cases(kernel="scaled matern52", n=1000, rare=True, exact=CG, most=5),
    cases(kernel="scaled rbf", n=820, rare=True, library="botorch", most=5),
    cases(kernel="scaled rbf", batch=["2", "2x3", "points"], likelihood=["gaussian", "fixed", "counting"]),
)
def a_step(see: See, kernel: str, mean: str = "constant", likelihood: str = "gaussian", n: int = 37, batch: str = ""):
    """Two steps of gradient descent, one of a large model."""
    b = {"": (), "2": (2,), "2x3": (2, 3), "points": (2,)}[batch]
    model = regression(see, n, kernel, likelihood, mean, b)
    for step in range(1 if n >= 600 else 2):
        loss = trained(see, model, f"{step} ")
        descended(loss, model, 0.05)


HOW = ["functional call", "jacrev", "vmap", "checkpoint", "reentrant checkpoint", "by data", "leaves of float32"]


@scenarios(
    cases(kernel=["scaled rbf", "rbf + matern"], how=HOW),
    cases(kernel=["scaled matern32", "scaled matern12"], how=["checkpoint", "by data"]),
    kappa=10.0,
    formula=GRAPHLESS,
)
def differentiated(see: See, kernel: str, how: str):
    """A loss of 11 points, differentiated in ways that are a loss's own; `contracts` has the others."""
    model = regression(see, 11, kernel)
    named, x = dict(model.named_parameters()), model.train_inputs[0]
    if how in ("functional call", "jacrev", "vmap"):
        _functional(see, model, named, how)
    elif "checkpoint" in how:
        reentrant = how.startswith("re")
        x = x.clone().requires_grad_(reentrant)
        model.train_inputs = (x,)
        loss = checkpoint(lambda x: loss_of(model, x), x, use_reentrant=reentrant)
        see("loss", loss)
        loss.backward()
        see("gradients", [p.grad for p in named.values()] + [x.grad])
    elif how == "by data":
        for name, orders in (("points", 2 if kernel.startswith("scaled matern") else 3), ("targets", 2)):
            leaves = {"points": x.clone().requires_grad_(), "targets": model.train_targets.clone().requires_grad_()}
            model.train_inputs, model.train_targets = (leaves["points"],), leaves["targets"]
            found = loss_of(model)
            for order in range(orders):
                (gradient,) = torch.autograd.grad(found, leaves[name], create_graph=True)
                see(f"derivative {order + 1} by {name}", gradient)
                found = gradient.sin().sum()
            see.grads(f"mixed with {name}", found, model)
    else:
        trained(see, model.float())


def _functional(see, model, named, how):
    model.train()
    x, y = model.train_inputs[0], model.train_targets
    objective = ExactMarginalLogLikelihood(model.likelihood, model)

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, y):
            return -objective(self.model(x), y)

    wrap = Loss()
    inner = {f"model.{name}": p for name, p in named.items()}

    def loss(swapped):
        return torch.func.functional_call(wrap, swapped, (y,))

    if how == "functional call":
        swapped = {name: (1.1 * p.detach()).requires_grad_() for name, p in inner.items()}
        through = {name: 1.1 * p for name, p in inner.items()}
        see("loss", loss(swapped))
        see.grads("swapped", loss(swapped), swapped)
        see.grads("through", loss(through), named)
    elif how == "jacrev":
        found = torch.func.jacrev(loss)({name: p.detach() for name, p in inner.items()})
        see("gradients", list(found.values()))
    else:
        stacked = {name: torch.stack((p.detach(), 1.2 * p.detach())) for name, p in inner.items()}
        see("losses", torch.func.vmap(loss)(stacked))
        found = torch.func.vmap(torch.func.grad(loss))(stacked)
        see("gradients", list(found.values()))


@scenarios(
    cases(what=["wrong length", "wrong batch", "scalar targets", "no distribution", "float32 targets", "too long"]),
    cases(what=["wrong length", "no distribution", "scalar targets"], likelihood=["fixed", "counting"]),
)
def a_mistake(see: See, what: str, likelihood: str = "gaussian"):
    """Stock's own errors, and no word of ours before them."""
    model = regression(see, 12, likelihood=likelihood).train()
    mll, y = ExactMarginalLogLikelihood(model.likelihood, model), model.train_targets
    output = model(model.train_inputs[0])
    given = {
        "wrong length": y[:7],
        "wrong batch": y.expand(3, 12),
        "scalar targets": 0.3,
        "no distribution": y,
        "float32 targets": y.float(),
        "too long": torch.cat((y, y)),
    }[what]
    with see.attempt("marginal likelihood"):
        see("loss", mll(output.mean if what == "no distribution" else output, given))
    with see.attempt("noisy"):
        see("density", model.likelihood(output).log_prob(given))


@scenarios(cases(policy=["mask", "fill", "ignore"], likelihood=["gaussian", "fixed", "missing", "counting"]))
def missing_targets(see: See, policy: str, likelihood: str):
    model = regression(see, 20, likelihood=likelihood)
    model.train_targets = model.train_targets.clone()
    model.train_targets[[3, 7]] = float("nan")
    with gpytorch.settings.observation_nan_policy(policy):
        trained(see, model)
        see.posterior("after", model.eval()(points(see, 5, seed=1)))


@scenarios(cases(kernel=["scaled rbf", "own"], what=["leave one out", "prior", "density", "samples", "expected"]))
def other_objectives(see: See, kernel: str, what: str):
    model = regression(see, 16, kernel).train()
    if what == "prior":
        model.covar_module.register_prior(
            "p", gpytorch.priors.GammaPrior(2.0, 3.0), lambda m: m.outputscale, lambda m, v: None
        )
    mll = (LeaveOneOutPseudoLikelihood if what == "leave one out" else ExactMarginalLogLikelihood)(
        model.likelihood, model
    )
    output = model(model.train_inputs[0])
    if what == "density":
        noisy = model.likelihood(output)
        targets = torch.stack((model.train_targets, -model.train_targets))
        found = noisy.log_prob(targets) + noisy.log_prob(model.train_targets)
    elif what == "samples":
        found = output.rsample(base_samples=normals(see, 3, 16))
    elif what == "expected":
        found = model.likelihood.expected_log_prob(values(model.train_inputs[0]), output)
    else:
        found = mll(output, model.train_targets)
    see("value", found)
    see.grads("gradient", found, model)
