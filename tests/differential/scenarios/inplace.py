"""In-place changes between forward and backward of what a user holds, and what stock then says."""

from __future__ import annotations

import torch
from builders import PLAIN, points, regression
from table import See, cases, scenarios

from scenarios.kernels import made
from scenarios.training import loss_of

NOTICED = "stock's backward pass may say that something was changed; one that kept what it needs may give the gradients"
CHANGES = {
    "diagonal": lambda k: k.diagonal().add_(0.1),
    "scaled": lambda k: k.mul_(2.0),
    "one entry": lambda k: k[0, 1].fill_(3.0),
    "zeroed": lambda k: k.zero_(),
}


@scenarios(
    cases(kernel=[*PLAIN, "rbf", "matern52", "rq", "rbf + matern", "own"], change="diagonal", n=70),
    cases(kernel=["scaled rbf", "scaled matern32"], change=list(CHANGES)[1:], n=70),
    cases(kernel=["rbf"], change="diagonal", n=820, most=5),
    cases(kernel=["scaled rbf"], change="diagonal", n=70, dtype="float32"),
    stale=NOTICED,
)
def matrix_changed(see: See, kernel: str, change: str, n: int):
    """Stock's exponentials raise where their result was changed, its other formulae do not."""
    k, x = made(see, kernel), points(see, n).requires_grad_()
    square = k(x).to_dense()
    square = square if see.first else square.clone()
    with see.attempt("changed"):
        CHANGES[change](square)
        see.grads("square", square.sin(), {**dict(k.named_parameters()), "x": x})


@scenarios(
    cases(kernel=[*PLAIN, "rq", "own"], what=["points"], n=70),
    cases(kernel=["scaled matern52"], what=["points"], n=820, rare=True, most=5),
    stale=NOTICED,
)
def points_changed(see: See, kernel: str, what: str, n: int):
    k, x, z = made(see, kernel), points(see, n), points(see, 9, seed=1)
    held = x if see.first else x.clone()
    across = k(held, z).to_dense()
    square = k(held).to_dense()
    with torch.no_grad():
        (x if what == "points" else z).mul_(0.3)
    with see.attempt("across"):
        see.grads("across", across.sin(), k)
    with see.attempt("square"):
        see.grads("square", square.sin(), k)


@scenarios(
    cases(
        kernel=["scaled rbf", "scaled matern52", "rbf + matern", "own"],
        what=["points", "targets", "parameter", "noise"],
    ),
    cases(kernel=["scaled rbf"], what=["points", "targets"], n=130, dtype="float32"),
    stale=NOTICED,
)
def data_changed(see: See, kernel: str, what: str, n: int = 30):
    """Between a loss and its backward pass."""
    model = regression(see, n, kernel)
    model.train_inputs, model.train_targets = (model.train_inputs[0].clone(),), model.train_targets.clone()
    loss = loss_of(model)
    with torch.no_grad():
        unchanged = {"points": lambda: None, "targets": lambda: None} if not see.first else {}
        {
            "points": lambda: model.train_inputs[0].mul_(0.3),
            "targets": lambda: model.train_targets.add_(1.0),
            "parameter": lambda: next(model.covar_module.parameters()).add_(1.0),
            "noise": lambda: model.likelihood.raw_noise.add_(1.0),
            **unchanged,
        }[what]()
    with see.attempt("backward"):
        see.grads("gradient", loss, model)


VIEW = {"the others' variance": "stock's variances are a view of the covariance", "covariance": "the same"}


@scenarios(
    cases(what=["mean", "covariance", "loss"], kernel=["scaled rbf", "own"]),
    cases(what=["variance"], kernel=["scaled rbf", "own"], may=VIEW),
)
def results_changed(see: See, what: str, kernel: str):
    """What a prediction returned is the user's to change; nothing else may notice."""
    model, x = regression(see, 20, kernel).eval(), points(see, 6, seed=1)
    p = model(x)
    if what == "loss":
        loss = loss_of(model)
        loss.detach().mul_(2.0)
        see.grads("gradient", loss, model)
        return
    read = {"mean": lambda: p.mean, "variance": lambda: p.variance, "covariance": lambda: p.covariance_matrix}[what]()
    with see.attempt("changed"), torch.no_grad():
        read.mul_(3.0)
    see("the others' variance", p.variance)
    see("covariance", p.covariance_matrix)
    see.posterior("again", model(x))


@scenarios(cases(kernel=["scaled rbf", "rbf + matern", "own"], what=["covariance of the prior", "after a loss"]))
def priors_changed(see: See, kernel: str, what: str):
    model = regression(see, 16, kernel).train()
    output = model(model.train_inputs[0])
    dense = output.covariance_matrix
    if what == "after a loss":
        loss = loss_of(model)
        with torch.no_grad():
            dense.mul_(2.0)
        with see.attempt("backward"):
            see.grads("gradient", loss, model)
    with torch.no_grad():
        dense.add_(1.0)
    see("read again", output.lazy_covariance_matrix.to_dense())
