"""Fantasies: values of the grown model, gradients by fantasy points, chains, noise, changes before and after."""

import contextlib
import copy

import torch
from builders import STRUCTURED, normals, points, regression, values
from table import See, cases, scenarios

from scenarios.events import EVENTS
from scenarios.predictions import under

LEADS = {"one": (), "targets": (), "both": (3,), "models": (2,), "targets of models": (2,)}


def fantasised(see: See, model, q: int, shape: str = "one", grad: bool = False, seed: int = 11, **more):
    z = points(see, *LEADS[shape], q, seed=seed).requires_grad_(grad)
    y = values(z.detach())
    if shape.startswith("targets"):
        y = torch.stack((y, y + 1, -y))
    y = y.detach().requires_grad_(grad)
    return z, y, model.get_fantasy_model(z, y, **more)


@scenarios(
    cases(kernel=["scaled rbf", "scaled matern52", "rbf + matern", "own", "features", *STRUCTURED]),
    cases(kernel=["scaled rbf", "rbf + linear"], shape=["targets", "both"]),
    cases(kernel=["scaled rbf", "rbf + linear"], setting=["fast", "attached"]),
    cases(likelihood=["fixed", "counting", "louder"]),
    cases(likelihood="fixed and learned", shape=["one", "both"], noise=[True, False]),
    cases(likelihood="fixed", shape=["one", "both"], noise=False),
    cases(n=[1, 130], q=[1, 5]),
    cases(kernel=["scaled rbf", "own"], dtype="float32", kappa=10.0),
    cases(kernel=["scaled rbf", "own"], steps=4),
    cases(kernel="scaled rbf", steps=3, dtype="float32", kappa=10.0),
    cases(kernel="rbf + linear", steps=2),
    cases(shape=["targets", "both"], steps=3, kappa=10.0),
    cases(shape=["models", "targets of models"], setting=["attached", "defaults"], likelihood=["gaussian", "fixed"]),
)
def grown(
    see, kernel="scaled rbf", shape="one", setting="defaults", likelihood="gaussian", n=20, q=3, noise=True, steps=1
):
    """A model, its fantasy, or fantasies of fantasies; what they and the first predict after it."""
    batch = LEADS[shape] if "models" in shape else ()
    with under(setting), torch.set_grad_enabled(steps == 1):
        model = regression(see, n, kernel, likelihood, batch=batch).eval()
        x = points(see, *batch, 6, seed=1)
        _ = model(x).variance
        given = likelihood.startswith("fixed") and noise
        more = {"noise": torch.full((*batch, q), 0.3, dtype=see.dtype)} if given else {}
        other = model
        with see.attempt("grew") if "models" in shape else contextlib.nullcontext():
            for step in range(steps):
                _, _, other = fantasised(see, other, q, shape, seed=11 + step, **more)
                see.posterior(f"grown {step}", other(x))
        see.posterior("once more", other(points(see, *batch, 4, seed=2)))
        see.posterior("old", model(x))
        see("targets", other.train_targets)
        see("type", type(other.prediction_strategy).__name__)


BOTH = ["defaults", "attached"]


@scenarios(
    cases(kernel=["scaled rbf", "rbf + linear", "own"], reading=BOTH, making=BOTH),
    cases(kernel=["scaled rbf", "rbf + linear"], shape=["targets", "both"], making="defaults", reading=BOTH),
    cases(kernel=["scaled rbf", "rbf + linear"], making="fast", reading="fast"),
    kappa=10.0,
)
def gradients_of_fantasies(see: See, kernel: str, making: str, reading: str, shape: str = "one"):
    """By fantasy points and targets, test points and hyperparameters, through mean and variance."""
    model = regression(see, 14, kernel).eval()
    with under(making):
        with torch.no_grad():
            _ = model(points(see, 2, seed=3)).variance
        z, y, other = fantasised(see, model, 2, shape, grad=True)
    with under(reading):
        x = points(see, 5, seed=1).requires_grad_()
        p = other(x)
        see("mean", p.mean)
        see("variance", p.variance)
        by = {"fantasy points": z, "fantasy targets": y, "points": x}
        for name, value in (("mean", p.mean), ("variance", p.variance)):
            see(f"{name} has a graph", value.requires_grad)
            see.grads(f"{name}", value.sin(), by)
        see.grads("variance once more", other(x).variance.sin(), by)


@scenarios(
    cases(
        event=["outputscale setter", "lengthscale setter", "noise setter", "fused Adam", "in place"],
        when=["before", "after"],
        fresh=True,
    ),
    cases(event="load_state_dict", when="before"),
    cases(
        event=["load_state_dict", "data of the noise", "points in place", "targets in place", "constraint"],
        when="after",
        fresh=True,
    ),
    stale="a fantasy grows the caches that there are, stock's stale ones too; a fresh model's are as good",
)
def changed(see: See, event: str, when: str):
    """A hyperparameter changes between a prediction and its fantasy, or after the fantasy."""
    model = regression(see, 16).eval()
    x = points(see, 6, seed=1)
    _ = model(x[:1] if see.first else x[:2]).variance
    if when == "before":
        EVENTS[event](see, model)
        if not see.first:  # what a fresh model would have cached
            model = copy.deepcopy(model)
            _ = model(x).variance
    _, _, other = fantasised(see, model, 2)
    if when == "after":
        if see.first:
            _ = other(x).variance
        EVENTS[event](see, other)
        other = other if see.first else copy.deepcopy(other)
    see.posterior("grown", other(x))
    see("variance again", other(points(see, 3, seed=2)).variance)


@scenarios(cases(how=["no prediction before", "wrong shapes"]))
def manners(see: See, how: str):
    model = regression(see, 16).eval()
    if how == "no prediction before":
        with see.attempt("fantasy"):
            fantasised(see, model, 2)
        return
    with torch.no_grad():
        _ = model(points(see, 6, seed=1)).variance
        with see.attempt("targets"):
            model.get_fantasy_model(points(see, 3, seed=2), normals(see, 2))
        with see.attempt("batches"):
            model.get_fantasy_model(points(see, 3, seed=2), normals(see, 2, 2, 3))
