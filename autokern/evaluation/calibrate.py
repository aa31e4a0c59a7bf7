"""Calibration with the hooks installed, so that composite ops are measured with inner ones dispatched, and its exam.

In the exam, typical tasks are timed in turns with the new choices, with the shipped ones, and with stock. Where the new
ones lose beyond the noise, the profile keeps the better ones for those ops and sizes, and the task is timed again.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gpytorch
import msgspec
import torch
from gpytorch.models import ExactGP

from autokern import ops as _ops  # noqa: F401  (importing it registers every Op)
from autokern.core.errors import SettingsError, interrupted
from autokern.core.op import LEVELS
from autokern.core.output import Progress, display
from autokern.core.problem import Problem, nothing
from autokern.core.registry import get
from autokern.core.settings import LEVELS_OF_ACCURACY
from autokern.core.state import inside
from autokern.hooks import install
from autokern.ops._problems import objective_model
from autokern.runtime import dispatch
from autokern.runtime.memo import current
from autokern.runtime.session import Session
from autokern.system import host
from autokern.tuning import timer
from autokern.tuning.profile import Examined, Kept, Profile

_SHARE = 0.1  # part of a calibration's budget that its exam takes at most
_LEAST = 0.5  # seconds that an exam needs
_WIDE = 1.75  # a kept choice holds from the task's size over this factor to its size times this factor
_LOST = 0.03  # a choice has lost above this log ratio and above twice its standard error
_USELESS = 0.3  # standard error of the log ratio from which on a comparison is discarded
_PASSES = 3  # times that a lost task is timed again
_ROUNDS = {"quick": (3, 7), "full": (5, 15)}
_D = 4

Task = Callable[[], Any]
_log = logging.getLogger("autokern")


def calibrate(
    ops: str | Iterable[str] | None = None,
    level: str = "quick",
    budget: float = 10.0,
    devices: str | Iterable[str] | None = None,
    progress: bool = True,
    accuracy: str | None = None,
) -> Profile:
    """Measure this machine, keep the result for later processes, and use it from now on.

    Parameters
    ----------
    ops : str or iterable of str, optional
        Names of ops; default all.
    level : {"quick", "full"}
        How many sizes, and how often.
    budget : float
        Seconds; a measurement that would exceed them does not begin.
    devices : str or iterable of str, optional
        Device kinds; default the CPU and the accelerator that torch finds.
    progress : bool
        Whether to show a progress bar on a terminal.
    accuracy : {"same", "approximate"}, optional
        Whether candidates of lower precision are measured too; default the setting ``AUTOKERN_ACCURACY``.

    Returns
    -------
    Profile
        All measurements of this machine, the new ones included.

    Raises
    ------
    SettingsError
        For an unknown op, an absent device, an unknown level, or a budget that is not positive and finite. Also under
        ``AUTOKERN_DETERMINISTIC=1``, which ignores measurements.

    Examples
    --------
    >>> profile = autokern.calibrate(["qr"], budget=0.3, devices=["cpu"], progress=False)
    >>> isinstance(profile, autokern.Profile)
    True
    """
    from autokern.tuning import calibration, store  # only calibration needs these

    for name, value, of in (("level", level, LEVELS), ("accuracy", accuracy, (None, *LEVELS_OF_ACCURACY))):
        if value not in of:
            raise SettingsError(f"{name} {value!r} was asked for; there are {', '.join(filter(None, of))}")
    if not 0 < budget < math.inf:
        raise SettingsError(f"a budget of {budget:g} s was given; measuring takes more than 0, and ends")
    chosen, kinds = calibration.chosen_ops(ops), calibration.chosen_devices(devices)
    with install.enabled():
        here = dispatch.session()
        if store.leaves_aside(here.settings):
            raise SettingsError("AUTOKERN_DETERMINISTIC=1 ignores measurements; unset it to measure")
        before = here.profile
        options: dict[str, Any] = {"accuracy": accuracy or here.settings.accuracy, "publish": here.adopt}
        seconds = _SHARE * budget if _SHARE * budget >= _LEAST and "cpu" in kinds else 0.0
        try:
            with display("autokern measures this machine", progress) as shown:
                found = calibration.calibrate(chosen, level, budget - seconds, kinds, before, progress=shown, **options)
                if seconds and found.forests:
                    found = examined(found, level, seconds, shown)
            if here.settings.profile is None:
                store.save(here.settings, found)
            here.adopt(found)
        except BaseException:  # interrupted or failed: the previous profile stays in force
            here.adopt(before)
            raise
    return found


def _points(n: int, seed: int) -> torch.Tensor:
    return torch.rand(n, _D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _model(n: int, dtype: torch.dtype = torch.float64) -> ExactGP:
    problem = Problem(op="objective", m=n, n=n, d=_D, dtype=str(dtype).removeprefix("torch."), variant="rbf")
    return objective_model(problem, torch.Generator().manual_seed(n), priors=False)


def _step(n: int, dtype: torch.dtype) -> Task:
    model = _model(n, dtype)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        (-mll(model(*model.train_inputs), model.train_targets)).backward()
        optimizer.step()

    return step


def _prediction(n: int, again: bool) -> Task:
    model, points = _model(n).eval(), _points(100, 1)

    @torch.no_grad()
    def predict() -> None:
        if not again:
            model.train().eval()
        out = model(points)
        out.mean, out.variance  # noqa: B018  (computed when they are read)

    return predict


def _fantasy(n: int) -> Task:
    model, points, value = _model(n).eval(), _points(1, 2), torch.zeros(1, dtype=torch.float64)
    with torch.no_grad():
        model(points).mean  # noqa: B018  (a fantasy needs the caches of a prediction)
    return torch.no_grad()(lambda: model.get_fantasy_model(points, value)(points).mean)


def _acquisition(n: int) -> Task:
    model, points = _model(n).eval().requires_grad_(False), _points(10, 3).unsqueeze(1).requires_grad_()

    def evaluate() -> None:
        with gpytorch.settings.fast_pred_var(), gpytorch.settings.detach_test_caches():  # as BoTorch calls models
            out = model(points)
        (out.mean + out.variance.sqrt()).sum().backward()
        points.grad = None

    return evaluate


def tasks() -> Iterator[tuple[str, Callable[[], Task]]]:
    """Yield the name of each task, and a function that creates it."""
    for n in (100, 300, 30, 800):
        for dtype in (torch.float64, torch.float32):
            yield f"training step, n = {n}, {str(dtype)[6:]}", functools.partial(_step, n, dtype)
    yield "first prediction, n = 300, float64", functools.partial(_prediction, 300, again=False)
    yield "later prediction, n = 300, float64", functools.partial(_prediction, 300, again=True)
    yield "fantasy, n = 100, float64", functools.partial(_fantasy, 100)
    yield "acquisition, n = 60, float64", functools.partial(_acquisition, 60)


def examined(profile: Profile, level: str, seconds: float, progress: Progress = nothing) -> Profile:
    """Return the profile with the exam of its choices, and better choices where these lose, within `seconds`."""
    settings, deadline = dispatch.session().settings, time.perf_counter() + seconds
    quiet = msgspec.structs.replace(settings, calibrate="never")
    shipped = Session(quiet)
    shipped.adopt(Profile(host=profile.host, fingerprint=profile.fingerprint))
    rows: list[Examined] = []
    waiting = list(tasks())
    with host.random_states_kept(), torch.enable_grad(), torch.device("cpu"):  # whatever the caller has set
        for index, (name, make) in enumerate(waiting):
            each = (deadline - time.perf_counter()) / (len(waiting) - index)
            if each <= 0:
                break
            progress(index / len(waiting), name)
            try:
                exam = _Exam(make(), shipped, quiet)
                row = exam.row(name, profile, each, _ROUNDS[level])
                for _ in range(_PASSES):
                    kept = [] if row is None else exam.verdict(row)
                    if not kept:
                        break  # else again with the better choices, by which inner ops may be dispatched
                    profile = msgspec.structs.replace(profile, kept=[*kept, *profile.kept])
                    row = exam.row(name, profile, each, _ROUNDS[level], kept[0].instead) or row
            except Exception as error:  # a failed exam leaves the measurements valid
                if interrupted(error):
                    raise
                _log.debug("the exam left out: %s", name, exc_info=True)
                continue
            if row is not None:
                rows.append(row)
    return msgspec.structs.replace(profile, exam=rows)


class _Exam:
    """One task, timed with stock, with the shipped choices, and with the new ones."""

    def __init__(self, task: Task, shipped: Session, settings: Any) -> None:
        self._task, self._shipped = task, shipped
        self._new = Session(settings)

    def _by(self, session: Session) -> None:
        before, token = dispatch.session(), current.set(None)  # leave the user's `using` block
        try:
            dispatch.replace(session)
            self._task()
        finally:
            dispatch.replace(before)
            current.reset(token)

    def _chosen(self, session: Session) -> dict[Any, str]:
        """Return the chosen candidate of each problem that one call of the task dispatches."""
        session.forget()
        self._by(session)
        return {found.decision.problem: found.candidate.name for t in session.memo.values() for found in t.values()}

    def row(
        self, name: str, profile: Profile, seconds: float, rounds: tuple[int, int], kept: str = ""
    ) -> Examined | None:
        """Return stock's seconds and the ratios of both choices to them, None if disturbed or too noisy."""
        self._new.adopt(profile)
        self.choices = self._chosen(self._shipped), self._chosen(self._new)
        stock = inside.having(active=True)(self._task)
        calls: dict[str, Task] = {"stock": stock, "shipped": functools.partial(self._by, self._shipped)}
        if self.choices[0] != self.choices[1]:
            calls["new"] = functools.partial(self._by, self._new)
        found = timer.compare(calls, synchronize=host.settle, seconds=seconds, min_time=1e-3, rounds=rounds)
        new = found.get("new", one := found["shipped"])
        noise = math.hypot(one.noise, new.noise) if new is not one else one.noise
        if max(one.disturbed, new.disturbed) or noise > _USELESS:
            return None
        return Examined(name, found["stock"].seconds, one.ratio, new.ratio, noise, kept)

    def verdict(self, row: Examined) -> list[Kept]:
        """Return the choices to keep instead of the new ones, none if the new ones have not lost."""
        error = max(_LOST, 2 * row.noise)
        shipped, new = self.choices
        if math.log(row.new / row.shipped) > error:
            return [_around(problem, "shipped") for problem, name in new.items() if shipped.get(problem) != name]
        if math.log(row.new) > error:
            used = [problem for problem, name in new.items() if name != "stock"]
            outermost = max((get(problem.op).nesting for problem in used), default=0)
            return [_around(problem, "stock") for problem in used if get(problem.op).nesting == outermost]
        return []


def _around(problem: Problem, instead: str) -> Kept:
    low, high = math.floor(problem.n / _WIDE), math.ceil(problem.n * _WIDE)
    return Kept(*problem.group, problem.grad, problem.batch > 1, low, high, instead)
