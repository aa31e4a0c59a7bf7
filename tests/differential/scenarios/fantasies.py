"""Fantasies: values of the grown model, gradients by fantasy points, chains, noise, changes before and after."""

from __future__ import annotations

import copy
import pickle

import torch
from builders import STRUCTURED, normals, points, regression, values
from table import See, cases, scenarios

from scenarios.events import EVENTS
from scenarios.predictions import under


def fantasised(see: See, model, q: int, shape: str = "one", grad: bool = False, **more):
    lead = {"one": (), "targets": (), "both": (3,)}[shape]
    z = points(see, *lead, q, seed=11).requires_grad_(grad)
    y = values(z.detach())
    if shape == "targets":
        y = torch.stack((y, y + 1, -y))
    y = y.detach().requires_grad_(grad)
    return z, y, model.get_fantasy_model(z, y, **more)


@scenarios(
    cases(kernel=["scaled rbf", "scaled matern52", "rbf + matern", "own", "features", *STRUCTURED]),
    cases(kernel=["scaled rbf", "rbf + linear"], shape=["targets", "both"]),
    cases(kernel=["scaled rbf", "rbf + linear"], setting=["fast", "attached"]),
    cases(kernel=["scaled rbf"], likelihood=["fixed", "counting", "louder"]),
    cases(kernel="scaled rbf", likelihood="fixed and learned", shape=["one", "both"], noise=[True, False]),
    cases(kernel="scaled rbf", likelihood="fixed", shape=["one", "both"], noise=False),
    cases(kernel=["scaled rbf"], n=[1, 130], q=[1, 5]),
    cases(kernel=["scaled rbf", "own"], dtype="float32", kappa=10.0),
)
def grown(
    see: See,
    kernel: str,
    shape: str = "one",
    setting: str = "defaults",
    likelihood: str = "gaussian",
    n: int = 20,
    q: int = 3,
    noise: bool = True,
):
    """A model, its fantasy, what both predict after it."""
    with under(setting):
        model = regression(see, n, kernel, likelihood).eval()
        x = points(see, 6, seed=1)
        _ = model(x).variance
        given = likelihood.startswith("fixed") and noise
        more = {"noise": torch.full((q,), 0.3, dtype=see.dtype)} if given else {}
        _, _, other = fantasised(see, model, q, shape, **more)
        see.posterior("grown", other(x))
        see.posterior("once more", other(points(see, 4, seed=2)))
        see.posterior("old", model(x))
        see("targets", other.train_targets)
        see("type", type(other.prediction_strategy).__name__)


@scenarios(
    cases(
        kernel=["scaled rbf", "rbf + linear", "own"],
        reading=["defaults", "attached"],
        making=["defaults", "attached"],
        kappa=10.0,
    ),
    cases(
        kernel=["scaled rbf", "rbf + linear"],
        shape=["targets", "both"],
        making=["defaults"],
        reading=["defaults", "attached"],
        kappa=10.0,
    ),
    cases(kernel=["scaled rbf", "rbf + linear"], making=["fast"], reading=["fast"], kappa=10.0),
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
    cases(kernel=["scaled rbf", "own"], steps=[4]),
    cases(kernel=["scaled rbf"], steps=[3], dtype="float32", kappa=10.0),
    cases(kernel=["rbf + linear"], steps=[2]),
    cases(kernel=["scaled rbf"], steps=[3], shape=["targets", "both"], kappa=10.0),
)
def chains(see: See, kernel: str, steps: int, shape: str = "one"):
    with torch.no_grad():
        model = regression(see, 12, kernel).eval()
        x = points(see, 6, seed=1)
        _ = model(x).variance
        for k in range(steps):
            z = points(see, *((3,) if shape == "both" else ()), 2, seed=20 + k)
            y = values(z) if shape != "targets" else torch.stack((values(z), -values(z), values(z) + 1))
            model = model.get_fantasy_model(z, y)
            see.posterior(f"after {k}", model(x))


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


@scenarios(cases(how=["pickle", "deepcopy", "no prediction before", "of a fantasy's copy", "wrong shapes", "trained"]))
def manners(see: See, how: str):
    model = regression(see, 16).eval()
    x = points(see, 6, seed=1)
    if how == "no prediction before":
        with see.attempt("fantasy"):
            fantasised(see, model, 2)
        return
    with torch.no_grad():
        _ = model(x).variance
        if how == "wrong shapes":
            with see.attempt("targets"):
                model.get_fantasy_model(points(see, 3, seed=2), normals(see, 2))
            with see.attempt("batches"):
                model.get_fantasy_model(points(see, 3, seed=2), normals(see, 2, 2, 3))
            return
        _, _, other = fantasised(see, model, 2)
        if how == "trained":
            other.train()
            other.eval()
        else:
            other = pickle.loads(pickle.dumps(other)) if how == "pickle" else copy.deepcopy(other)
        see.posterior("grown", other(x))
        if how.startswith("of"):
            see.posterior("twice", fantasised(see, other, 1)[2](x))


@scenarios(cases(setting=["attached", "defaults"], likelihood=["gaussian", "fixed"]))
def a_batch_of_models(see: See, setting: str, likelihood: str):
    with under(setting):
        model = regression(see, 13, likelihood=likelihood, batch=(2,)).eval()
        x = points(see, 2, 5, seed=1)
        _ = model(x).variance
        z = points(see, 2, 3, seed=4)
        more = {"noise": torch.full((2, 3), 0.3, dtype=see.dtype)} if likelihood == "fixed" else {}
        see.posterior("grown", model.get_fantasy_model(z, values(z), **more)(x))
        targets = torch.stack((values(z), -values(z), values(z) + 1))
        with see.attempt("more targets"):
            see.posterior("many", model.get_fantasy_model(z, targets)(x))
