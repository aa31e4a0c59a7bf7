"""A state machine over one model: whatever is done to it, it predicts as a fresh one does, or as stock's own stale one.

Two models go through the same life, one under autokern and one under stock. After every step the first one's mean and
variance are those of a copy of the second without caches, or the second's own. What is read late of a posterior is
what stock computed at its call, with its gradients.
"""

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from builders import points, regression
from gpytorch.kernels import RBFKernel, ScaleKernel
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scenarios.events import ALL
from scenarios.late import Predicts
from scenarios.predictions import under
from scenarios.training import loss_of
from table import See
from user_code import Buffered
from ways import HOSTS, defaults, enabled, session

import autokern

SETTERS = ["outputscale setter", "lengthscale setter", "noise setter", "initialize", "data copy", "data assigned",
        "load_state_dict", "Adam", "fused Adam", "fused SGD", "in place", "other parameter"]  # fmt: skip
"""The seven ways to set a hyperparameter (the eighth, `functional_call`, is a rule of its own), some for several."""
WAYS = {
    "recorded": {"AUTOKERN_PROFILE": str(HOSTS[0])},
    "the other recorded": {"AUTOKERN_PROFILE": str(HOSTS[-1])},
    "eager": {"AUTOKERN_FORCE": "predict=eager"},
    "rows": {"AUTOKERN_FORCE": "predict=lazy,fantasy=rows"},
}
"""How autokern runs while a model lives."""
_TIGHT = 1e-6
"""Of the largest entry: the two models' hyperparameters drift apart by rounding while they are trained."""
_MOST = 40
"""Points of a model; fantasies end there."""


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    scale = max(expected.detach().abs().max().item(), 1e-2)
    return bool(((found - expected).abs().max() / scale) <= _TIGHT)


def attempted(read: Callable[..., Any], *of: Any) -> tuple[Any, str]:
    """Return what was read and nothing, or nothing and how it failed."""
    try:
        return read(*of), ""
    except Exception as error:
        return None, type(error).__name__


def begun(parts: Any) -> list[Any]:
    """The first entries of tensors, to be told."""
    return parts and [t.flatten()[:3].tolist() for t in parts]


def both_variances(p: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the variances, which the library keeps positive, and the diagonal of the covariance, which it does not."""
    return p.variance, p.covariance_matrix.diagonal(dim1=-2, dim2=-1)


def gradients(of: torch.Tensor, by: list[torch.Tensor]) -> list[torch.Tensor | None]:
    wanted = [p for p in by if p.requires_grad]
    found = iter(torch.autograd.grad(of.sum(), wanted, allow_unused=True, retain_graph=True))
    return [next(found) if p.requires_grad else None for p in by]


class Life(RuleBasedStateMachine):
    """Of one model; subclasses say in which way autokern runs."""

    orders: dict[str, str]

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        self.stack.enter_context(defaults("gpytorch"))
        self.stack.enter_context(torch.random.fork_rng(devices=[]))
        self.stack.enter_context(enabled())
        self.stack.enter_context(session(**self.orders))
        self.see = See(torch.float64)
        self.late: list[tuple[Any, ...]] = []
        self.places = 1

    def teardown(self) -> None:
        self.stack.close()

    @contextlib.contextmanager
    def stock(self):
        autokern.disable()
        try:
            yield
        finally:
            autokern.enable()

    def fresh(self) -> Any:
        """A model of the present state without caches."""
        return copy.deepcopy(self.theirs)

    def both(self, act: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Do the same to both models; return what it gave."""
        ours, failed = attempted(act, self.ours)
        with self.stock():
            theirs, their_failure = attempted(act, self.theirs)
        assert failed == their_failure, f"{failed or 'nothing'} was raised, by stock {their_failure or 'nothing'}"
        return ours, theirs

    def agree(self, read: Callable[[Any], dict[str, list[torch.Tensor]]]) -> None:
        """What is read of our model by each name is what is read of theirs, or of a fresh one."""
        ours, failed = attempted(read, self.ours)
        with self.stock():
            theirs, stale = attempted(read, self.theirs)
            fresh, fails = attempted(lambda: read(self.fresh()))
        assert not failed or failed in (stale, fails), f"{failed} was raised, by stock {stale or 'nothing'}"
        for name, found in (ours or {}).items():
            allowed = [one and one[name] for one in (theirs, fresh)]
            words = f"{name}: {begun(found)}, stock's {begun(allowed[0])}, of a fresh model {begun(allowed[1])}"
            assert any(one and all(map(close, found, one)) for one in allowed), words

    def at(self, m: int, seed: int | None = None) -> torch.Tensor:
        return points(self.see, m, seed=self.places if seed is None else seed)

    def learned(self) -> bool:
        """Whether the noise is a parameter."""
        return hasattr(self.ours.likelihood, "raw_noise")

    @initialize(kernel=st.sampled_from(["known", "buffered", "own"]), likelihood=st.sampled_from(["gaussian", "fixed"]),
                setting=st.sampled_from(["defaults", "fast", "attached"]))  # fmt: skip
    def born(self, kernel: str, likelihood: str, setting: str) -> None:
        self.stack.enter_context(under(setting))
        self.kind, self.setting = kernel, setting

        def made() -> Any:
            known = ScaleKernel(RBFKernel(ard_num_dims=2))
            other = {"known": known, "buffered": known + ScaleKernel(Buffered()), "own": "own"}[kernel]
            return regression(self.see, 12, other, likelihood).eval()

        self.ours, self.theirs = made(), made()

    @rule(fused=st.booleans())
    def train(self, fused: bool) -> None:
        def step(model: Any) -> list[torch.Tensor]:
            ps = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.Adam(ps, lr=0.05, fused=fused)
            loss = loss_of(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.eval()
            return [loss.detach(), *(p.grad for p in ps if p.grad is not None)]

        ours, theirs = self.both(step)
        assert all(map(close, ours or (), theirs or ())), "a step of training"

    @rule(what=st.sampled_from(SETTERS))
    def set_hyperparameter(self, what: str) -> None:
        if what != "noise setter" or self.learned():
            self.both(lambda model: ALL[what](self.see, model))

    @rule(what=st.sampled_from(["points in place", "targets in place", "data set", "targets set", "mean in place"]))
    @precondition(lambda self: self.ours.train_targets.dim() == 1)
    def change_data(self, what: str) -> None:
        if what != "data set" or self.learned():
            self.both(lambda model: ALL[what](self.see, model))

    @rule(what=st.sampled_from(["trained and evaluated", "buffer in place", "noise in place"]))
    def change_another(self, what: str) -> None:
        can = {"buffer in place": self.kind == "buffered", "noise in place": not self.learned()}
        if can.get(what, True):
            self.both(lambda model: ALL[what](self.see, model))

    @rule(q=st.integers(1, 3))
    @precondition(lambda self: self.ours.train_targets.shape[-1] < _MOST)
    def fantasise(self, q: int) -> None:
        z = self.at(q, 77)
        noise = {} if self.learned() else {"noise": torch.full((q,), 0.2).double()}

        def grow(model: Any) -> Any:
            return model.get_fantasy_model(z, z[:, 0], **noise)

        ours, failed = attempted(grow, self.ours)
        with self.stock():
            theirs, stale = attempted(grow, self.theirs)
            if theirs is None:  # caches that no longer hold may be too bad to grow
                fresh = self.fresh()
                _, fails = attempted(lambda: fresh(z).covariance_matrix)
                theirs, fails = (None, fails) if fails else attempted(grow, fresh)
        assert ours is not None or failed == stale, f"{failed} was raised, by stock {stale or 'nothing'}"
        if None not in (ours, theirs):
            self.ours, self.theirs = ours, theirs

    @rule(how=st.sampled_from(["pickle", "deepcopy"]))
    def duplicate(self, how: str) -> None:
        copied = copy.deepcopy if how == "deepcopy" else lambda model: pickle.loads(pickle.dumps(model))
        made = self.both(copied)
        if None not in made:
            self.ours, self.theirs = made

    @rule(m=st.integers(1, 9), grad=st.booleans())
    def predict(self, m: int, grad: bool) -> None:
        self.places += 1
        with torch.set_grad_enabled(grad):
            self._predicts_as_it_should(m)

    @rule(m=st.integers(1, 9))
    def functional(self, m: int) -> None:
        x = self.at(m, 55)

        def called(model: Any) -> dict[str, list[torch.Tensor]]:
            wrap = Predicts(model if self.setting == "attached" else copy.deepcopy(model))
            named = {name: p for name, p in wrap.named_parameters() if p.requires_grad}
            p = torch.func.functional_call(wrap, {name: 1.1 * q for name, q in named.items()}, (x,))
            found = torch.autograd.grad(p.variance.sum(), list(named.values()), allow_unused=True)
            return {"a functional call": [p.variance, *(torch.zeros(1) if g is None else g for g in found)]}

        self.agree(called)

    @rule(m=st.integers(1, 9))
    @precondition(lambda self: len(self.late) < 3)
    def predict_for_later(self, m: int) -> None:
        x = self.at(m)
        ours, theirs = self.both(lambda model: model(x))
        if theirs is not None:
            with self.stock():
                kept = [t.detach().clone() for t in both_variances(theirs)]
                made = self.fresh()
                fresh, _ = attempted(lambda: both_variances(made(x)))
                slopes, _ = attempted(lambda: [gradients(one, list(made.parameters())) for one in fresh])
            parameters = [list(model.parameters()) for model in (self.ours, self.theirs)]
            allowed = [kept] if fresh is None else [kept, [t.detach() for t in fresh]]
            self.late.append((ours, theirs, allowed, slopes, parameters))

    @rule(joint=st.booleans())
    @precondition(lambda self: bool(self.late))
    def read_late(self, joint: bool) -> None:
        """What was predicted before later changes: as it was, with gradients to the parameters of its call."""
        ours, theirs, allowed, slopes, (of_ours, of_theirs) = self.late.pop(0)
        found = both_variances(ours)[int(joint)]
        then = [one[int(joint)] for one in allowed]
        assert any(close(found, one) for one in then), f"a variance read late: {begun([found, *then])}"
        with self.stock():
            expected, failed = attempted(lambda: gradients(both_variances(theirs)[int(joint)], of_theirs))
        if failed or slopes is None:  # stock's backward pass sees that something was changed
            return
        for k, one in enumerate(gradients(found, of_ours)):
            both = expected[k], slopes[int(joint)][k]
            right = (
                any(other is None for other in both)
                if one is None
                else any(close(one, o) for o in both if o is not None)
            )
            assert right, f"the late gradient by parameter {k}: {one}, of {both}"

    def _predicts_as_it_should(self, m: int) -> None:
        x = self.at(m)

        def read(model: Any) -> dict[str, list[torch.Tensor]]:
            p = model(x)
            return {"mean": [p.mean], "variance": [p.variance], "covariance": [p.covariance_matrix]}

        self.agree(read)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "ours"):
            self._predicts_as_it_should(4)
