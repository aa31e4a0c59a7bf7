"""In-place changes between forward and backward of what a user holds, and what stock then says."""

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
    cases(kernel=[*PLAIN, "rbf", "matern52", "rq", "rbf + matern", "own"], change="diagonal"),
    cases(kernel=["scaled rbf", "scaled matern32"], change=list(CHANGES)[1:]),
    cases(kernel="rbf", change="diagonal", n=820, most=5),
    cases(kernel="scaled rbf", change="diagonal", dtype="float32"),
    cases(kernel=[*PLAIN, "rq", "own"], change="points"),
    cases(kernel="scaled matern52", change="points", n=820, rare=True, most=5),
    stale=NOTICED,
)
def matrix_changed(see: See, kernel: str, change: str, n: int = 70):
    """Stock's exponentials raise where their result was changed, its other formulae do not."""
    k, x = made(see, kernel), points(see, n)
    held = (x if see.first else x.clone()).requires_grad_(change != "points")
    across, square = k(held, points(see, 9, seed=1)).to_dense(), k(held).to_dense()
    if change == "points":
        x.mul_(0.3)
    square = square if see.first else square.clone()
    for name, found in (("across", across), ("square", square)):
        with see.attempt(name):
            if change != "points" and name == "square":
                CHANGES[change](square)
            see.grads(name, found.sin(), {**dict(k.named_parameters()), "x": held})


@scenarios(
    cases(
        kernel=["scaled rbf", "scaled matern52", "rbf + matern", "own"],
        what=["points", "targets", "parameter", "noise"],
    ),
    cases(kernel="scaled rbf", what=["points", "targets"], n=130, dtype="float32"),
    stale=NOTICED,
)
def data_changed(see: See, kernel: str, what: str, n: int = 30):
    model = regression(see, n, kernel)
    model.train_inputs, model.train_targets = (model.train_inputs[0].clone(),), model.train_targets.clone()
    loss = loss_of(model)
    changes = {
        "points": lambda: model.train_inputs[0].mul_(0.3),
        "targets": lambda: model.train_targets.add_(1.0),
        "parameter": lambda: next(model.covar_module.parameters()).add_(1.0),
        "noise": lambda: model.likelihood.raw_noise.add_(1.0),
    }
    with torch.no_grad():
        if see.first or what in ("parameter", "noise"):
            changes[what]()
    with see.attempt("backward"):
        see.grads("gradient", loss, model)


VIEW = {"the others' variance": "stock's variances are a view of the covariance", "covariance": "the same"}
READ = {"mean": lambda p: p.mean, "variance": lambda p: p.variance, "covariance": lambda p: p.covariance_matrix}


@scenarios(
    cases(what=["mean", "covariance"], kernel=["scaled rbf", "own"]),
    cases(what="variance", kernel=["scaled rbf", "own"], may=VIEW),
)
def results_changed(see: See, what: str, kernel: str):
    """What a prediction returned is the user's to change; nothing else may notice."""
    model, x = regression(see, 20, kernel).eval(), points(see, 6, seed=1)
    p = model(x)
    read = READ[what](p)
    with see.attempt("changed"), torch.no_grad():
        read.mul_(3.0)
    see("the others' variance", p.variance)
    see("covariance", p.covariance_matrix)
    see.posterior("again", model(x))


@scenarios(cases(kernel=["scaled rbf", "rbf + matern", "own"], what=["covariance", "after a loss", "loss"]))
def priors_changed(see: See, kernel: str, what: str):
    """The covariance of a prior, before or after its loss, or the value of a loss."""
    model = regression(see, 16, kernel).train()
    output = model(model.train_inputs[0])
    dense = output.covariance_matrix
    if what != "covariance":
        loss = loss_of(model)
        with torch.no_grad():
            (dense if what == "after a loss" else loss.detach()).mul_(2.0)
        with see.attempt("backward"):
            see.grads("gradient", loss, model)
    with torch.no_grad():
        dense.add_(1.0)
    see("read again", output.lazy_covariance_matrix.to_dense())
