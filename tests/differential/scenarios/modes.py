"""Modes of torch and of its process: whatever holds while a model is used, it computes as stock, there and after it."""

import contextlib
import pathlib
import warnings

import gpytorch
import torch
from builders import points, regression
from support.threads import in_threads
from table import See, cases, scenarios
from torch.autograd import forward_ad

from scenarios.training import CG, loss_of, trained

WHAT = ["matrix", "training", "prediction", "fantasy"]
DTYPES = ["float64", "float32"]


def used(see: See, name: str, what: str, model, x):
    if what == "matrix":
        square = model.covar_module(x).to_dense()
        see(f"{name} square", square)
        if square.requires_grad:
            see.grads(f"{name} square", square, model.covar_module)
        with torch.no_grad():
            see(f"{name} across", model.covar_module(x, x[:3] + 0.1).to_dense())
    elif what == "product":
        see(f"{name} product", model.covar_module(x) @ x)
    elif what == "training":
        trained(see, model, f"{name} ")
    else:
        p = model.eval()(x)
        see.posterior(name, p)
        if what == "fantasy":
            see.posterior(f"{name} grown", model.get_fantasy_model(x[:2], x[:2, 0])(x))


@contextlib.contextmanager
def _having(put, value, before):
    put(value)
    try:
        yield
    finally:
        put(before)


def _default_dtype(see):
    other = torch.float64 if see.dtype == torch.float32 else torch.float32
    return _having(torch.set_default_dtype, other, torch.get_default_dtype())


MODES = {
    "autocast": lambda see: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": lambda see: torch.inference_mode(),
    "no_grad": lambda see: torch.no_grad(),
    "another default device": lambda see: torch.device("meta"),
    "another default dtype": _default_dtype,
    "another thread": lambda see: contextlib.nullcontext(),
    "anomaly": lambda see: torch.autograd.detect_anomaly(check_nan=True),
    "deterministic": lambda see: _having(torch.use_deterministic_algorithms, True, False),
    "hooks": lambda see: torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda t: t),
}


@scenarios(
    cases(
        mode="autocast", what=WHAT[:3], kernel=["scaled rbf", "scaled matern52", "own"], dtype=["float64", "float32"]
    ),
    cases(mode=["inference", "no_grad"], what=WHAT[1:]),
    cases(mode="another default device", what=WHAT),
    cases(mode="another default device", what=["training", "prediction"], kernel=["own", "rbf + matern"]),
    cases(mode="another default device", what="training", kernel=["scaled rbf", "scaled matern52"], n=130),
    cases(mode="another default device", what=["matrix", "prediction"], kernel="scaled matern52", n=130),
    cases(mode="another default dtype", what=WHAT, dtype=DTYPES),
    cases(mode="another thread", what=["training", "prediction"], kernel=["scaled rbf", "own"]),
    cases(mode=["anomaly", "deterministic", "hooks"], what=["training", "prediction"]),
)
def under_a_mode(see: See, mode: str, what: str, kernel: str = "scaled rbf", n: int = 17):
    """The default device is not the data's, and nothing may stay rounded by autocast."""
    model, x = regression(see, n, kernel), points(see, 5, seed=1).requires_grad_(mode in ("anomaly", "hooks"))
    with see.attempt("went"), MODES[mode](see):
        if mode == "another thread":
            in_threads(used, [see], ["there"], [what], [model], [x])
        else:
            used(see, "there", what, model, x)
    used(see, "after", what, model.train(), x)


@scenarios(cases(what=[*WHAT, "product"]), cases(what=["prediction", "training"], n=820, exact=CG, most=5))
def many_calls(see: See, what: str, n: int = 30):
    """The same call a few times, each between draws: nothing may move the random numbers of a user."""
    model, x = regression(see, n), points(see, 6, seed=1)
    drawn = []
    for k in range(4 if n > 800 else 6):
        drawn.append(torch.rand(1).item())
        with torch.set_grad_enabled(what not in ("prediction", "fantasy")):
            used(see, str(k), what, model, x)
    if n <= 800:
        see("drawn", drawn)


@scenarios(cases(what=[*WHAT[:3], "dual points"], kernel=["scaled rbf", "rbf + matern", "own"]))
def forward_mode(see: See, what: str, kernel: str):
    model, x = regression(see, 12, kernel), points(see, 5, seed=1)
    with forward_ad.dual_level(), see.attempt("went"):
        if what == "training":
            found = loss_of(model, y=forward_ad.make_dual(model.train_targets, torch.ones(12, dtype=see.dtype)))
        else:
            dual = forward_ad.make_dual(points(see, 5, seed=2), torch.ones_like(x))
            found = {
                "matrix": lambda: model.covar_module(dual).to_dense(),
                "dual points": lambda: model.covar_module(dual, x).to_dense(),
                "prediction": lambda: model.eval()(dual).mean,
            }[what]()
        value, tangent = forward_ad.unpack_dual(found)
        see("value", value)
        see("tangent", tangent if tangent is not None else "none")


@scenarios(cases(what=["matrix", "prediction", "variance"], kernel=["scaled rbf", "scaled matern52"]))
def traced(see: See, what: str, kernel: str):
    model, x = regression(see, 12, kernel).eval().requires_grad_(False), points(see, 5, seed=1)

    def run(x):
        if what == "matrix":
            return model.covar_module(x).to_dense()
        return model(x).variance if what == "variance" else model(x).mean

    with torch.no_grad(), gpytorch.settings.trace_mode(), gpytorch.settings.fast_pred_var():
        _ = model(x).variance if what == "variance" else model(x).mean
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            script = torch.jit.trace(run, (x,), check_trace=False)
        see("told", sorted({pathlib.Path(one.filename).name for one in told}))
        see("there", script(x))
        see("elsewhere", script(points(see, 5, seed=2)))


@scenarios(cases(what=["training", "prediction", "failure"]))
def settings_after(see: See, what: str):
    """What calls leave in the process."""
    model, x = regression(see, 20), points(see, 6, seed=1)
    with see.attempt("went"):
        if what == "failure":
            model.covar_module.base_kernel.forward = None
        _ = loss_of(model).backward() if what == "training" else model.eval()(x).variance
    see("process", [torch.is_grad_enabled(), torch.get_num_threads(), str(torch.get_default_dtype())])
    see("settings", [gpytorch.settings.max_cholesky_size.value(), gpytorch.settings.fast_pred_var.on()])
    see("names", [sorted(dict(named)) for named in (model.named_modules(), model.named_parameters())])
    see("state", sorted(model.state_dict()))
    see("active", str(model.covar_module.active_dims))


class Broken(gpytorch.kernels.RBFKernel):
    """Raises at its third call."""

    calls = 0

    def forward(self, x1, x2, diag=False, **params):
        type(self).calls += 1
        if type(self).calls == 2:
            raise KeyError("a user's own error")
        return super().forward(x1, x2, diag=diag, **params)


@scenarios(cases(where=["training", "prediction", "late"]))
def user_errors(see: See, where: str):
    """An error of user code comes through as it is, and the model works after it."""
    Broken.calls = 0 if where != "late" else -1
    model, x = regression(see, 15, gpytorch.kernels.ScaleKernel(Broken())), points(see, 5, seed=1)
    for k in range(3):
        with see.attempt(f"time {k}"):
            used(see, str(k), "training" if where == "training" else "prediction", model, x)
