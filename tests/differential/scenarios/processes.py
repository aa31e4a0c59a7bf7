"""What calls leave in the process: random numbers, settings, modes, modules, many calls running."""

from __future__ import annotations

import gpytorch
import torch
from builders import points, regression
from table import See, cases, scenarios

from scenarios.training import CG, loss_of


@scenarios(
    cases(what=["matrix", "training", "prediction", "fantasy", "product"]),
    cases(what=["prediction", "training"], n=820, exact=CG, most=5),
)
def many_calls(see: See, what: str, n: int = 30):
    """The same call a few times, each between draws: nothing may move the random numbers of a user."""
    model, x = regression(see, n), points(see, 6, seed=1)
    drawn = []
    for k in range(4 if n > 800 else 6):
        drawn.append(torch.rand(1).item())
        if what == "matrix":
            see(f"square {k}", model.covar_module(x).to_dense())
        elif what == "product":
            see(f"product {k}", model.covar_module(x) @ x)
        elif what == "training":
            see(f"loss {k}", loss_of(model))
        else:
            with torch.no_grad():
                p = model.eval()(x)
                see(f"mean {k}", p.mean)
                see(f"variance {k}", p.variance)
                if what == "fantasy":
                    see(f"grown {k}", model.get_fantasy_model(x[:1], x[:1, 0])(x).mean)
    if n <= 800:
        see("drawn", drawn)


@scenarios(cases(what=["training", "prediction", "failure"]))
def settings_after(see: See, what: str):
    model, x = regression(see, 20), points(see, 6, seed=1)
    with see.attempt("went"):
        if what == "training":
            loss_of(model).backward()
        elif what == "prediction":
            _ = model.eval()(x).variance
        else:
            model.covar_module.base_kernel.forward = None
            _ = model.eval()(x).variance
    see("grad", torch.is_grad_enabled())
    see("threads", torch.get_num_threads())
    see("dtype", str(torch.get_default_dtype()))
    see("cholesky", gpytorch.settings.max_cholesky_size.value())
    see("fast", gpytorch.settings.fast_pred_var.on())
    see("modules", sorted(dict(model.named_modules())))
    see("parameters", sorted(dict(model.named_parameters())))
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
            if where == "training":
                see(f"loss {k}", loss_of(model))
            else:
                see.posterior(f"posterior {k}", model.eval()(x))
