"""Awkward numbers: duplicates, far offsets, tiny noise, NaN, underflow. float32 is held to float64 truth."""

import gpytorch
import torch
from builders import KERNELS, PLAIN, ROUNDED, normals, points, regression, values
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from table import See, cases, scenarios

from scenarios.kernels import made
from scenarios.predictions import under
from scenarios.training import loss_of, trained


def awkward(see: See, kind: str, n: int, span: float, d: int = 2):
    x = points(see, n, d=d).double()
    if "repeated" in kind:
        k = max(1, n // 5)
        x[-k:] = x[:k]
    if "equal" in kind:
        x[:] = x[:1]
    if "near" in kind:
        x[n // 2 :] = x[: n - n // 2] + 1e-7
    x = x * span
    if "far" in kind:
        x = x + 1000.0
    if "apart" in kind:
        x[: n // 2] += 1e4
    if "one dimension" in kind:
        x[:, 1] = 1e5 * x[:, 1]
    return x.float().to(see.dtype)


def condition(k: torch.Tensor, noise: float) -> float:
    """The condition number of a covariance and its noise."""
    values = torch.linalg.eigvalsh(k.detach() + noise * torch.eye(k.shape[-1], dtype=k.dtype))
    return (values[-1] / values[0]).item()


CASES = [("repeated", 1.0), ("repeated", 100.0), ("repeated", 300.0), ("far", 1.0), ("far and repeated", 1.0),
         ("near", 1.0), ("apart", 1.0), ("plain", 1e-3), ("plain", 1000.0), ("one dimension", 1.0), ("equal", 1.0),
         ("repeated", 1e4)]  # fmt: skip
FAILS = {"raised": "float32 cannot tell that this is positive definite, and stock gives up; who can tell, may answer"}
FLOAT32 = [
    {"kind": kind, "span": span, "dtype": "float32", **({"may": FAILS} if kind == "apart" else {})}
    for kind, span in CASES
]


@scenarios(
    *[cases(**c, kernel=["scaled rbf", "scaled matern12"], n=90) for c in FLOAT32],
    *[cases(**c, kernel=["scaled matern32", "scaled matern52"], n=90) for c in FLOAT32[2:5]],
    cases(kind="repeated", span=300.0, kernel=PLAIN, n=90, formula=ROUNDED, kappa=100.0),
)
def awkward_matrix(see: See, kind: str, span: float, kernel: str, n: int):
    x, k = awkward(see, kind, n, span), made(see, kernel)
    square = k(x).to_dense()
    see("square", square)
    see("above the variance", bool((square > k.outputscale * (1 + 1e-6)).any()))
    see("across", k(x, x[:7] * 1.01).to_dense())
    see.grads("square", square.sin(), k)


@scenarios(
    *[cases(**c, kernel=["scaled rbf"], n=70, noise=[1e-3]) for c in FLOAT32],
    cases(kind="repeated", span=300.0, kernel=["scaled rbf"], n=300, noise=1e-3, dtype="float32"),
    cases(kind="repeated", span=200.0, kernel=PLAIN[1:], n=300, noise=1e-3, dtype="float32"),
    cases(kind=["repeated", "far", "near"], span=1.0, kernel=["scaled rbf"], n=40, noise=1e-4, kappa=100.0),
)
def awkward_training(see: See, kind: str, span: float, kernel: str, n: int, noise: float):
    """The issue's third defect: not positive definite where stock trains, by distances that are not clamped."""
    x = awkward(see, kind, n, span)
    if see.truth:
        see.kappa = condition(KERNELS[kernel](torch.Size()).double()(x).to_dense(), noise) / 1000
    model = regression(see, n, kernel, x=x, y=(x[:, 0] / span).double().sin().float().to(see.dtype))
    model.likelihood.noise = noise
    trained(see, model)


@scenarios(*[cases(**c, noise=1e-2, kappa=10.0) for c in FLOAT32[:9]])
def awkward_posterior(see: See, kind: str, span: float, noise: float):
    x = awkward(see, kind, 50, span)
    model = regression(see, 50, "scaled matern52", x=x, y=normals(see, 50)).eval()
    model.likelihood.noise = noise
    p = model(x[:11] * 1.003)
    see("mean", p.mean)
    see("variance", p.variance)
    see("positive", bool((p.variance > -1e-3).all()))


def survived(see: See, model, z: torch.Tensor) -> None:
    """Note how training and a prediction go, or fail."""
    with see.attempt("trained"):
        trained(see, model)
    with see.attempt("predicted"):
        p = model.eval()(z)
        see("mean", p.mean)
        see("variance", p.variance)


OF_NAN = {
    "gradient by covar_module.base_kernel.raw_lengthscale": "where one point's distance is zero and the loss is NaN, "
    "stock's gradient is NaN for an RBF kernel by torch 2.13 and zero by 2.14"
}


@scenarios(
    cases(kernel=["scaled rbf", "scaled matern32", "rbf + matern"], where=["points", "test points"]),
    cases(kernel=["scaled rbf", "scaled matern32", "own"], where=["targets", "everything", "infinite points"]),
    cases(kernel=["scaled rbf"], where=["points"], n=1),
    cases(kernel=["scaled rbf"], where=["targets"], n=1, may=OF_NAN),
    cases(kernel=["scaled rbf", "scaled matern12"], where=["points"], dtype="float32"),
)
def not_numbers(see: See, kernel: str, where: str, n: int = 9):
    x, z = points(see, n), points(see, 4, seed=1)
    y, bad = values(x), float("inf") if "infinite" in where else float("nan")
    at = min(2, n - 1)
    if "points" in where and "test" not in where:
        x[at, 0] = bad
    if where == "everything":
        x[:] = bad
    if where == "test points":
        z[1, 1] = bad
    if where == "targets":
        y = y.clone()
        y[at] = bad
    k = made(see, kernel)
    with see.attempt("matrix"):
        see("square", k(x).to_dense())
        see("across", k(z, x).to_dense())
        see("diagonal", k(x).diagonal())
    survived(see, regression(see, n, kernel, x=x, y=y), z)


@scenarios(
    cases(
        what=["outputscale", "raw outputscale", "lengthscale", "huge lengthscale", "huge outputscale", "noise"],
        dtype=["float32", "float64"],
        kappa=100.0,
        formula=ROUNDED,
    )
)
def underflow(see: See, what: str):
    """Hyperparameters whose softplus is zero or huge."""
    raw = {"raw outputscale": -800.0, "outputscale": -120.0, "huge outputscale": 1e6}
    k = KERNELS["scaled rbf"](torch.Size()).to(see.dtype)
    with torch.no_grad():
        if what in raw:
            k.raw_outputscale.fill_(raw[what])
        elif "lengthscale" in what:
            k.base_kernel.raw_lengthscale.fill_(-40.0 if what == "lengthscale" else 1e4)
    x = points(see, 8)
    square = k(x).to_dense()
    see("square", square)
    see.grads("square", square, k)
    model = regression(see, 8, k)
    if what == "noise":
        model.likelihood.noise = 2e-4
    survived(see, model, points(see, 3, seed=1))


@scenarios(cases(what=["indefinite", "singular", "nan", "jitter"], setting=["defaults", "attached"]))
def not_positive_definite(see: See, what: str, setting: str):
    """Warnings and errors of factorisations that need jitter."""
    x = points(see, 12)
    x = x[:1].expand(12, 2).clone() if what in ("singular", "jitter") else x
    likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(0.0))
    likelihood.noise = 1e-9 if what != "jitter" else 1e-17
    model = regression(see, 12, ScaleKernel(MaternKernel(2.5)), likelihood, x=x, y=normals(see, 12))
    if what == "indefinite":
        with torch.no_grad():
            model.covar_module.raw_outputscale_constraint = gpytorch.constraints.Interval(-10.0, 10.0)
            model.covar_module.raw_outputscale.fill_(-3.0)
    if what == "nan":
        model.train_inputs[0][0] = float("nan")
    with under(setting):
        with see.attempt("trained"):
            see("finite loss", bool(loss_of(model).isfinite()))
        with see.attempt("predicted"):
            see("finite", bool(model.eval()(points(see, 3, seed=1)).variance.isfinite().all()))
