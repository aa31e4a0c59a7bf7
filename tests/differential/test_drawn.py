"""Beyond the table: combinations that hypothesis draws, and lives of one model; more of each with --torture."""

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from builders import GRAPHLESS, KERNELS, LIKELIHOODS, MEANS, points, regression
from compare import judged
from gpytorch.kernels import ScaleKernel
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from machine import WAYS, Life
from scenarios.events import EVENTS, STALE
from scenarios.predictions import read, under
from scenarios.training import loss_of
from table import Scenario, See

pytestmark = pytest.mark.timeout(7200)

LEAVES = ["rbf", "rbf ard", "matern12", "matern32", "matern52", "active dimension", "rq", "periodic", "own", "doubled",
          "wrong diagonal", "deep", "buffered", "scaled rbf", "scaled matern52", "linear"]  # fmt: skip
SETTINGS = ["defaults", "fast", "attached", "small eager", "eager kernels", "memory efficient"]
MOMENTS = ["outputscale setter", "noise setter", "load_state_dict", "fused Adam", "fused SGD", "SGD", "data copy",
           "data assigned", "initialize", "in place", "mean in place", "targets in place", "data set", "frozen",
           "trained and evaluated", "points in place"]  # fmt: skip
DERIVATIVES = ["none", "by hyperparameters", "by points", "twice", "batched", "no_grad", "inference"]
Tree = Any
Recipe = SimpleNamespace


def _trees() -> st.SearchStrategy[Tree]:
    def grown(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        pair = st.tuples(st.sampled_from(["+", "*"]), inner, inner)
        return st.one_of(pair, st.tuples(st.just("scaled"), inner))

    return st.recursive(st.sampled_from(LEAVES), grown, max_leaves=3)


def recipes(largest: int) -> st.SearchStrategy[Recipe]:
    """A strategy of recipes with at most so many points."""
    return st.builds(
        Recipe,
        kernel=_trees(),
        likelihood=st.sampled_from([k for k in LIKELIHOODS if k != "missing"]),
        mean=st.sampled_from(list(MEANS)),
        n=st.integers(1, largest),
        m=st.integers(1, largest),
        event=st.sampled_from(["none", *MOMENTS]),
        late=st.booleans(),
        derivative=st.sampled_from(DERIVATIVES),
        setting=st.sampled_from(SETTINGS),
        dtype=st.sampled_from(["float64", "float64", "float32"]),
    )


def kernel_of(tree: Tree) -> Any:
    if isinstance(tree, str):
        return KERNELS[tree](torch.Size())
    if tree[0] == "scaled":
        return ScaleKernel(kernel_of(tree[1]))
    one, other = kernel_of(tree[1]), kernel_of(tree[2])
    return one + other if tree[0] == "+" else one * other


def _words(tree: Tree) -> str:
    return tree if isinstance(tree, str) else f"{tree[0]}({', '.join(map(_words, tree[1:]))})"


def program(see: See, recipe: Recipe) -> None:
    """Train, predict, let something happen, predict again or read what was predicted."""
    kernel = ScaleKernel(kernel_of(recipe.kernel))  # which events change
    model = regression(see, recipe.n, kernel, recipe.likelihood, recipe.mean)
    with under(recipe.setting), see.attempt("went"):
        loss = loss_of(model)
        see("loss", loss)
        see.grads("loss", loss, model)
        model.eval()
        z = points(see, recipe.m, seed=5).requires_grad_(recipe.derivative in ("by points", "twice"))
        if recipe.late:
            p = model(z)
            if not see.first:  # what is read late is what it was
                _read(see, recipe, model, p, z)
        elif see.first:
            p = model(z)
            _ = p.mean, p.variance
        if recipe.event != "none":
            EVENTS[recipe.event](see, model)
        if not recipe.late:
            grad, inference = recipe.derivative != "no_grad", recipe.derivative == "inference"
            with torch.set_grad_enabled(grad), torch.inference_mode(inference):
                p = model(z)
                _ = p.variance if inference else None
        if see.first or not recipe.late:
            _read(see, recipe, model, p, z)


def _read(see: See, recipe: Recipe, model: Any, p: Any, z: torch.Tensor) -> None:
    if recipe.derivative in ("by hyperparameters", "by points"):
        read(see, "posterior", p, model, {"z": z} if recipe.derivative == "by points" else model)
        return
    see.posterior("posterior", p)
    if recipe.derivative == "twice" and p.variance.requires_grad:
        (first,) = torch.autograd.grad(p.variance.sum(), z, create_graph=True)
        see("first", first)
        if first.requires_grad:
            see.grads("second", first.sin(), {"z": z})
    elif recipe.derivative == "batched" and p.variance.requires_grad:
        ps = [q for q in model.parameters() if q.requires_grad]
        each = torch.eye(p.variance.numel(), dtype=p.variance.dtype)[:3]
        found = torch.autograd.grad(p.variance, ps, each, is_grads_batched=True, allow_unused=True)
        see("each", [f for f in found if f is not None])


def scenario_of(recipe: Recipe) -> Scenario:
    """The scenario of a recipe; its kernels may make a matrix singular but for the noise."""
    words = [_words(recipe.kernel), *(str(value) for name, value in vars(recipe).items() if name != "kernel")]
    kappa = 100.0 * (30.0 if "matern12" in words[0] else 1.0)
    second = recipe.derivative == "twice" or "matern" in words[0]
    return Scenario(
        f"drawn: {', '.join(words)}",
        partial(program, recipe=recipe),
        recipe.dtype,
        kappa=kappa,
        stale=STALE if recipe.event != "none" else "",
        formula=GRAPHLESS if second else "",
    )


class Size(NamedTuple):
    """How much is drawn: recipes, the most points of one, runs by force, lives of a model in each way, their steps."""

    recipes: int
    largest: int
    most: int
    lives: int
    steps: int

    def few(self, examples: int) -> settings:
        """Nothing is made smaller: that takes minutes, where tests have seconds."""
        return settings(
            max_examples=examples, stateful_step_count=self.steps, derandomize=self is not SIZES["full"], deadline=None,
            database=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate),
        )  # fmt: skip


SIZES = {None: Size(20, 24, 2, 4, 16), "ci": Size(40, 24, 4, 8, 16), "full": Size(3000, 140, 14, 300, 40)}


@pytest.fixture
def size(request):
    return SIZES[request.config.getoption("--torture")]


def test_what_is_drawn_is_stocks(size):
    """All of it is judged: to shrink an example costs more than to read several."""
    wrong: list[str] = []

    @size.few(size.recipes)
    @given(recipe=recipes(size.largest))
    def each(recipe):
        scenario = scenario_of(recipe)
        for way, texts in judged(scenario, size.most).items():
            wrong.extend(f"{scenario.name} [{way}] {text}" for text in texts[:3])

    each()
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("way", WAYS)
def test_a_life(way, size):
    kind = type("Life", (Life,), {"orders": WAYS[way]})
    run_state_machine_as_test(kind, settings=size.few(size.lives))
