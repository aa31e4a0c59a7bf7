"""A digital elevation model learned without a matrix, for `end_to_end.py`.

The data come with matplotlib (`jacksboro_fault_dem.npz`: 344 × 403 heights around Jacksboro, Tennessee). Every sixth
point in both directions is held out; a random part of the others is learned. As Wang et al. (2019) do, an exact model
on a small part gives the hyperparameters to begin with; it is the yardstick too.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
from children import Peak, in_child
from matrixfree import products, rmse, stock_bytes
from measuring import Report, Scale, Toggles
from torch import Tensor
from training import forced_exact
from workloads import Regression, Trainer, scaled

from autokern.core.output import duration

KILOMETRES = 111.2
EVERY = 6
LEARNING_RATE = 0.1
LIMIT = 1800.0
STOCK_SECONDS, STOCK_LIMIT = 120.0, 300.0
"""Seconds after which stock begins no other step of training, and after which its process ends."""


class Terrain(NamedTuple):
    """Places in kilometres, ``(points, 2)``, and heights in metres: those to learn, in random order, and the others."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor
    shape: tuple[int, int]


def terrain() -> Terrain:
    """Return the elevation model; the places held out are a grid of `shape`."""
    from matplotlib import cbook

    with cbook.get_sample_data("jacksboro_fault_dem.npz") as data:
        heights, middle = torch.from_numpy(data["elevation"].astype(float)), (data["ymin"] + data["ymax"]) / 2
        down, right = float(data["dy"]) * KILOMETRES, float(data["dx"]) * KILOMETRES * math.cos(math.radians(middle))
    rows, columns = (torch.arange(size, dtype=torch.float64) for size in heights.shape)
    places = torch.stack(torch.meshgrid(down * rows, right * columns, indexing="ij"), -1)
    out = torch.zeros(heights.shape, dtype=torch.bool)
    out[EVERY // 2 :: EVERY, EVERY // 2 :: EVERY] = True
    held = places[out], heights[out]
    rest = torch.randperm(int((~out).sum()), generator=torch.Generator().manual_seed(0))
    grid = heights[EVERY // 2 :: EVERY, EVERY // 2 :: EVERY].shape
    return Terrain(places[~out][rest], heights[~out][rest], *held, (grid[0], grid[1]))


def model_of(x: Tensor, y: Tensor, dtype: torch.dtype) -> Regression:
    """Return a scaled Matérn 5/2 model of standardised heights at places in kilometres."""
    model = Regression(x.to(dtype), ((y - y.mean()) / y.std()).to(dtype), scaled("matern52", 2))
    model.likelihood.noise = 0.1
    return model


@torch.no_grad()
def heights_at(model: Regression, y: Tensor, x: Tensor) -> Tensor:
    mean = model.eval()(x.to(model.train_inputs[0])).mean.double()
    return mean * y.std() + y.mean()


def exact_part(of: Terrain, points: int, steps: int) -> tuple[Regression, dict[str, Any]]:
    """Train an exact model on a few points in stock; return it with its error and time."""
    start = time.perf_counter()
    y = of.y[:points]
    with forced_exact():
        trainer = Trainer(model_of(of.x[:points], y, torch.float64), LEARNING_RATE)
        for _ in range(steps):
            trainer()
        error = rmse(heights_at(trainer.model, y, of.held_x), of.held_y)
    return trainer.model, {"n": points, "steps": steps, "rmse": error, "seconds": time.perf_counter() - start}


def learned(n: int, steps: int, points: int, part_steps: int, dispatched: bool = True) -> dict[str, Any]:
    """Train on n points from the hyperparameters of a part, and predict the points held out; in stock if so asked.

    Stock stops before the step that would begin after `STOCK_SECONDS`.
    """
    import autokern

    of = terrain()
    small, part = exact_part(of, points, part_steps)
    if dispatched:
        autokern.enable()
    y = of.y[:n]
    meter, start = Peak(), time.perf_counter()
    model = model_of(of.x[:n], y, torch.float32)
    model.load_state_dict({name: value.float() for name, value in small.state_dict().items()})
    trainer, losses = Trainer(model, LEARNING_RATE), []
    for _ in range(steps):
        if not dispatched and time.perf_counter() - start > STOCK_SECONDS:
            return {"training_seconds": time.perf_counter() - start, "steps": len(losses), "bytes": meter.bytes()}
        trainer()
        losses.append(trainer.loss)
    middle, training = time.perf_counter(), products(autokern.stats())
    found = heights_at(model, y, of.held_x)
    end = time.perf_counter()
    kernel = model.covar_module
    return {
        "training_seconds": middle - start, "prediction_seconds": end - middle, "bytes": meter.bytes(),
        "loss": losses, "products": sum(training.values()), "candidates": products(autokern.stats()),
        "rmse": {"trivial": rmse(y.mean().expand_as(of.held_y), of.held_y), "all": rmse(found, of.held_y)},
        "part": part, "shape": of.shape,
        "lengthscale": kernel.base_kernel.lengthscale.flatten().tolist(), "noise": model.likelihood.noise.item(),
        "heights": of.held_y.int().tolist(), "predicted": found.round(decimals=1).tolist(),
    }  # fmt: skip


def in_stock(*arguments: Any) -> dict[str, Any]:
    """Return what the same takes in stock, whose memory has no limit: seconds, or how far it came in how many."""
    found = in_child("elevation", "learned", *arguments, False, limit=STOCK_LIMIT, returned=False)
    if "failed" in found:
        return {**found, "limit": STOCK_LIMIT}
    return {name: value for name, value in found.items() if name not in ("heights", "predicted")}


def run_elevation(scale: Scale, toggles: Toggles, report: Report) -> dict[str, Any]:
    arguments = scale.terrain, scale.terrain_steps, *scale.terrain_part
    found = in_child(
        "elevation", "learned", *arguments,
        environment={"AUTOKERN_MEMORY": scale.terrain_memory}, limit=LIMIT,
    )  # fmt: skip
    if "failed" in found:
        report(f"elevation, n={scale.terrain}: {found['failed']}")
    else:
        error = ", ".join(f"{name} {value:.1f} m" for name, value in found["rmse"].items())
        report(
            f"elevation, n={scale.terrain}: RMSE {error}, exact on {found['part']['n']} {found['part']['rmse']:.1f} m; "
            f"training {duration(found['training_seconds'])}, prediction {duration(found['prediction_seconds'])}, "
            f"{found['bytes'] / 2**20:.0f} MiB"
        )
    stock = in_stock(*arguments)
    needs = stock_bytes(scale.terrain, family="matern52")
    return {"n": scale.terrain, "steps": scale.terrain_steps, "memory": scale.terrain_memory,
            "stock_needs_bytes": needs, "stock": stock, "child": found}  # fmt: skip
