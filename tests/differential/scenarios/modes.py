"""Modes of torch: autocast, forward-mode derivatives, vmap, inference, default devices and dtypes, scripts, threads."""

from __future__ import annotations

import contextlib
import threading
import warnings

import gpytorch
import torch
from builders import PLAIN, points, regression
from table import See, cases, scenarios

from scenarios.kernels import made
from scenarios.predictions import under
from scenarios.training import loss_of


@scenarios(
    cases(
        what=["matrix", "training", "prediction"],
        kernel=["scaled rbf", "scaled matern52", "own"],
        cast=["bfloat16"],
        dtype=["float64", "float32"],
    )
)
def autocast(see: See, what: str, kernel: str, cast: str):
    """Under autocast, and after it: nothing may stay rounded."""
    model, x = regression(see, 20, kernel), points(see, 6, seed=1)
    for moment in ("under", "after"):
        off = cast == "disabled" or moment == "after"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not off), see.attempt(f"{moment} went"):
            if what == "matrix":
                see(f"{moment} square", model.covar_module(x).to_dense())
                with torch.no_grad():
                    see(f"{moment} across", model.covar_module(x, x[:3] + 0.1).to_dense())
            elif what == "training":
                loss = loss_of(model)
                see(f"{moment} loss", loss)
                see.grads(f"{moment} gradient", loss, model)
            else:
                p = model.eval()(x)
                see(f"{moment} mean", p.mean)
                see(f"{moment} variance", p.variance)
                model.train()


@scenarios(cases(kernel=["matern12", "matern32", "matern52", "rbf"], dtype=["float32"]))
def first_traced_under_autocast(see: See, kernel: str):
    """The issue's eighth defect: what is traced once under autocast keeps its casts."""
    k, x = made(see, kernel), points(see, 20)
    with torch.no_grad():
        _forget_traces()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            k(x).to_dense()
        see("after", k(x).to_dense())
        _forget_traces()


def _forget_traces():
    """Let whatever autokern traced in this process be traced anew, where it keeps such a thing."""
    import sys

    module = sys.modules.get("autokern.kernels.graph")
    for name in ("_scripted", "scripted"):
        forget = getattr(getattr(module, name, None), "cache_clear", None)
        if forget is not None:
            forget()


@scenarios(
    cases(what=["matrix", "training", "prediction", "dual points"], kernel=["scaled rbf", "rbf + matern", "own"])
)
def forward_mode(see: See, what: str, kernel: str):
    model, x = regression(see, 12, kernel), points(see, 5, seed=1)
    import torch.autograd.forward_ad as fwd

    with fwd.dual_level(), see.attempt("went"):
        if what == "training":
            y = fwd.make_dual(model.train_targets, torch.ones_like(model.train_targets))
            found = loss_of(model, y=y)
        elif what == "matrix":
            dual = fwd.make_dual(x, torch.ones_like(x))
            found = model.covar_module(dual).to_dense()
        elif what == "dual points":
            raw = next(p for p in model.covar_module.parameters())
            dual = fwd.make_dual(points(see, 5, seed=2), torch.ones(5, 2, dtype=see.dtype))
            found = model.covar_module(dual, x).to_dense() * raw.detach().sum()
        else:
            found = model.eval()(fwd.make_dual(x, torch.ones_like(x))).mean
        value, tangent = fwd.unpack_dual(found)
        see("value", value)
        see("tangent", tangent if tangent is not None else "none")


@scenarios(cases(kernel=["scaled rbf", "scaled matern52"], what=["jvp", "vmap", "grad", "jacrev", "hessian"]))
def transforms(see: See, kernel: str, what: str):
    k, x, z = made(see, kernel), points(see, 4), points(see, 3, seed=1)
    f = torch.func

    def total(x):
        return k(x, z).to_dense().sin().sum()

    with see.attempt("went"):
        if what == "jvp":
            see("jvp", list(f.jvp(total, (x,), (torch.ones_like(x),))))
        elif what == "vmap":
            see("vmap", f.vmap(lambda x: k(x, z).to_dense())(points(see, 5, 4, seed=3)))
        elif what == "grad":
            see("grad", f.grad(total)(x))
        elif what == "jacrev":
            see("jacrev", f.jacrev(lambda x: k(x, z).to_dense())(x))
        else:
            see("hessian", f.hessian(total)(x))


@scenarios(cases(mode=["inference", "no_grad"], what=["training", "prediction", "fantasy"], setting=["defaults"]))
def without_graphs(see: See, mode: str, what: str, setting: str):
    model, x = regression(see, 17), points(see, 5, seed=1)
    with under(setting), torch.inference_mode() if mode == "inference" else torch.no_grad(), see.attempt("went"):
        if what == "training":
            see("loss", loss_of(model))
        else:
            p = model.eval()(x)
            see.posterior("posterior", p)
            if what == "fantasy":
                see.posterior("grown", model.get_fantasy_model(x[:2], x[:2, 0])(x))
    with see.attempt("after"):
        see.posterior("after", model.eval()(x))


@scenarios(
    cases(what=["matrix", "training", "prediction", "fantasy"], device=["meta"]),
    cases(what=["training", "prediction"], device=["meta"], kernel=["own", "rbf + matern"]),
    cases(what=["training"], device=["meta"], n=[130], kernel=["scaled rbf", "scaled matern52"]),
    cases(what=["matrix", "prediction"], device=["meta"], n=[130], kernel=["scaled matern52"]),
)
def another_default_device(see: See, what: str, device: str, kernel: str = "scaled rbf", n: int = 17):
    """The default device is not the data's: what makes tensors of its own must say where."""
    model, x = regression(see, n, kernel), points(see, 5, seed=1)
    torch.set_default_device(device)
    with see.attempt("went"):
        _used(see, "there", what, model, x)
    torch.set_default_device(None)
    _used(see, "back", what, model.train(), x)


@scenarios(cases(what=["matrix", "training", "prediction", "fantasy"], dtype=["float32", "float64"]))
def another_default_dtype(see: See, what: str):
    model, x = regression(see, 17), points(see, 5, seed=1)
    torch.set_default_dtype(torch.float64 if see.dtype == torch.float32 else torch.float32)
    with see.attempt("went"):
        _used(see, "there", what, model, x)


def _used(see: See, name: str, what: str, model, x):
    if what == "matrix":
        square = model.covar_module(x).to_dense()
        see(f"{name} square", square)
        see.grads(f"{name} square", square, model.covar_module)
    elif what == "training":
        loss = loss_of(model)
        see(f"{name} loss", loss)
        see.grads(f"{name} gradient", loss, model)
    else:
        p = model.eval()(x)
        see.posterior(name, p)
        if what == "fantasy":
            see.posterior(f"{name} grown", model.get_fantasy_model(x[:2], x[:2, 0])(x))


@scenarios(cases(what=["matrix", "prediction", "variance"], kernel=["scaled rbf", "scaled matern52"]))
def traced(see: See, what: str, kernel: str):
    model, x = regression(see, 12, kernel).eval().requires_grad_(False), points(see, 5, seed=1)
    with torch.no_grad(), gpytorch.settings.trace_mode(), gpytorch.settings.fast_pred_var():
        _ = model(x).variance if what == "variance" else model(x).mean

        def run(x):
            if what == "matrix":
                return model.covar_module(x).to_dense()
            return model(x).variance if what == "variance" else model(x).mean

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            script = torch.jit.trace(run, (x,), check_trace=False)
        see("there", script(x))
        see("elsewhere", script(points(see, 5, seed=2)))


@scenarios(cases(what=["training", "prediction"], kernel=[PLAIN[0], "own"]))
def another_thread(see: See, what: str, kernel: str):
    model, x = regression(see, 17, kernel), points(see, 5, seed=1)
    failed = []

    def run():
        try:
            _used(see, "there", what, model, x)
        except Exception as error:
            failed.append(repr(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    see("failed", failed)
    _used(see, "here", what, model.train(), x)


@scenarios(cases(what=["training", "prediction"], how=["anomaly", "deterministic", "graph kept", "hooks"]))
def watched(see: See, what: str, how: str):
    model, x = regression(see, 17), points(see, 5, seed=1).requires_grad_()
    with contextlib.ExitStack() as stack:
        if how == "anomaly":
            stack.enter_context(torch.autograd.detect_anomaly(check_nan=True))
        if how == "hooks":
            packed = []
            stack.enter_context(
                torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t.clone(), lambda t: t)
            )
        if how == "deterministic":
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        _used(see, "there", what, model, x)
        if how == "graph kept":
            output = model.train()(model.train_inputs[0])
            see("again", list(torch.autograd.grad(output.covariance_matrix.sum(), model.covar_module.parameters())))
