"""`explain(model)`: which parts of a model candidates serve, and why the library computes the others.

A copy of the model takes a training step and predicts. The code that refuses a part states the reason.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import gpytorch
import msgspec
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import GP, ApproximateGP, ExactGP

from autokern.core import errors
from autokern.core.autograd import computed_share
from autokern.core.decision import Decision
from autokern.core.errors import SettingsError, caught, suppressed
from autokern.core.op import copied
from autokern.core.output import Shown
from autokern.core.releases import known
from autokern.core.replay import Held, held
from autokern.hooks import install
from autokern.model.kernel_parts import FAMILIES
from autokern.prediction.variational import VariationalCovariance
from autokern.runtime import api, dispatch
from autokern.runtime.api import Explanation

_HINTS = {
    "a kernel ": f"read are {', '.join(sorted(filter(None, FAMILIES)))}; their scales, sums and products",
    "a forward ": "read is one that returns MultivariateNormal(self.mean_module(x), self.covar_module(x))",
    "a mean ": "read are constant, zero and linear means",
    "a likelihood ": "read are GaussianLikelihood, FixedNoiseGaussianLikelihood and DirichletClassificationLikelihood",
}
"""Parts that can be read instead, by the beginning of a reason."""
_INDENT = 18 * " "


class Served(Shown, msgspec.Struct, frozen=True):
    """How a model is served; prints as a table.

    Parameters
    ----------
    title : str
        The model's class, its points, dtype and device.
    rows : list
        For each part: its name, the candidates that served it, and reasons why the library computed the rest.
    """

    title: str
    rows: list[tuple[str, str, str]]

    def __str__(self) -> str:
        lines = [self.title]
        for part, by, why in self.rows:
            for line, start in ((by, f"  {part + ':':<15} "), *((line, _INDENT) for line in why.splitlines())):
                lines += textwrap.wrap(line, 80, initial_indent=start, subsequent_indent=_INDENT)
        return "\n".join(filter(None, [*lines, known.summary(known.unknown())]))

    __repr__ = __str__


def explain(op: str | GP | None = None, **fields: Any) -> Decision | Explanation | Served:
    """Return how a model is served, or the candidate that would run for a problem; alone, all decisions so far.

    Parameters
    ----------
    op : str or gpytorch model, optional
        Name of an op, or a model; a copy of the model is trained for one step and predicts.
    **fields
        Fields of the Problem: ``m``, ``n``, ``d``, ``rhs``, ``batch``, ``dtype``, ``device``, ``grad``, ``variant``.

    Returns
    -------
    Decision, Explanation or Served
        Times in seconds, memory in bytes; ``print`` shows a table.

    Raises
    ------
    SettingsError
        For an unknown op or field, a value that is out of range, or a model that is neither exact nor variational.

    Examples
    --------
    >>> decision = autokern.explain("qr", m=500, n=50)
    >>> decision.problem.n, decision.candidate in autokern.op("qr").names()
    (50, True)
    """
    if not isinstance(op, torch.nn.Module):
        return api.explain(op, **fields)
    several = getattr(op, "models", None) or [op]
    if not all(isinstance(one, (ExactGP, ApproximateGP)) for one in several):
        kind = type(op).__name__
        raise SettingsError(f"a {kind} was asked for; explain takes an ExactGP, an ApproximateGP or a list")
    rows, titles = [], []
    with install.enabled():
        if not install.is_enabled():
            raise SettingsError("nothing is served: AUTOKERN=0 switches autokern off")
        for number, one in enumerate(several):
            label = f"{number + 1}, " if len(several) > 1 else ""
            first = next(iter(one.parameters()), torch.zeros(0))
            count = f"{one.train_inputs[0].shape[-2]} points, " if isinstance(one, ExactGP) and one.train_inputs else ""
            titles.append(
                f"{type(one).__name__}: {count}{str(first.dtype).removeprefix('torch.')}, {first.device.type}"
            )
            rows += [(f"{label}{part}", by, why) for part, by, why in _rows(one)]
    return Served(title="; ".join(dict.fromkeys(titles)), rows=rows)


def _rows(model: Any) -> Iterator[tuple[str, str, str]]:
    with suppressed(Exception):  # so that no cache and no counter of the model changes, if it has a copy
        model = copied(model)
    if isinstance(model, ApproximateGP):
        strategy = model.variational_strategy
        strategy = getattr(strategy, "base_variational_strategy", strategy)  # of each task
        points = strategy.inducing_points.detach()[..., :2, :] + 0.1
        found: list[Any] = []
        part, by, why = _told("training step", lambda: found.append(model.train()(points)))
        direct = by == "fails" or type(found[0].lazy_covariance_matrix) is VariationalCovariance
        yield part, by, why if direct else _replayed(held(model))
        yield _told("prediction", lambda: model.eval()(points).variance)
        return
    if model.train_inputs is None:
        yield "all", "the library", "the model has no data"
        return
    yield _trained(model)
    new = [t[..., :1, :] + (0.01 if t.is_floating_point() else 0) for t in model.train_inputs]
    model.eval()
    yield (predicted := _told("prediction", torch.no_grad()(lambda: model(*new).variance)))
    settings = gpytorch.settings
    with settings.fast_pred_var(), settings.detach_test_caches(), settings.debug(False):
        new = [t.clone().requires_grad_(t.is_floating_point()) for t in new]
        part, by, why = _told("acquisition", lambda: model(*new).variance.sum().backward())
    yield part, by, why or (predicted[2] if by == "the library" else "")  # the strategy is refused once


def _trained(model: Any) -> tuple[str, str, str]:
    mll = ExactMarginalLogLikelihood(model.likelihood, model.train())
    losses = []

    def step() -> None:
        losses.append(mll(model(*model.train_inputs), model.train_targets))
        losses[0].sum().backward()

    part, by, why = _told("training step", step)
    if not losses or computed_share(losses[0]) == 1:
        return part, by, why
    from autokern.hooks.later.losses import Loss

    found = Loss(mll).consists(mll, None, None, model(*model.train_inputs), model.train_targets)
    return part, by, "\n".join(filter(None, [why, _replayed(found)]))


def _replayed(found: Held | str) -> str:
    return f"no replays: {found}" if isinstance(found, str) else "in long loops it is recorded and replayed"


def _told(part: str, run: Callable[[], Any]) -> tuple[str, str, str]:
    """Run a part; return its name, the candidates that served it, and why the library computed the rest."""
    before = dispatch.stats()
    try:
        with errors.heard() as told:
            run()
    except caught(Exception) as error:
        return part, "fails", f"{type(error).__name__}: {error}".splitlines()[0]
    counts = ((op, *each) for op, by in dispatch.stats().items() for each in by.items())
    new = ((op, name) for op, name, count in counts if count > before.get(op, {}).get(name, 0))
    served = [f"{op} by {name}" for op, name in new if name != "stock"]
    hinted = dict[str, None]()
    for _, reason in told:
        hints = [f" ({hint})" for start, hint in _HINTS.items() if reason.startswith(start)]
        hinted[f"not read: {reason}{''.join(hints)}"] = None
    return part, ", ".join(served) or "the library", "\n".join(hinted)
