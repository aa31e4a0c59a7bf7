"""T13: what hypothesis composes of kernels, likelihoods, events, derivatives and settings is stock's, in every way.

A longer draw than that of `tests/differential`, whose ways and comparisons these are: recipes, each as stock,
with a recorded profile, without one, forced to candidate after candidate and drawn at random; and lives of one model,
which after every step predicts as a fresh one does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from harness import Findings, Mutation, main
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parents[1] / "differential"))


class Size(NamedTuple):
    """How much is drawn: recipes, the most points of one, runs by force, lives of a model, steps, and anew or not."""

    recipes: int
    largest: int
    most: int
    lives: int
    steps: int
    anew: bool


SIZES = {"ci": Size(40, 24, 4, 8, 16, False), "full": Size(3000, 140, 14, 300, 40, True)}


def _few(size: Size, examples: int, phases: tuple[Phase, ...]) -> settings:
    return settings(
        max_examples=examples, deadline=None, database=None, derandomize=not size.anew, phases=phases,
        suppress_health_check=list(HealthCheck), stateful_step_count=size.steps,
    )  # fmt: skip


def table(found: Findings, size: Size) -> None:
    """Judge the scenarios that the tests leave out, all of them in full size; candidates until each has run."""
    import scenarios  # noqa: F401
    from judge import judged
    from table import TABLE

    chosen = [one for one in TABLE.values() if one.rare or size.anew][:: 1 if size.anew else 4]
    for scenario in chosen:
        _, wrong = judged(scenario, both=size.anew)
        found.broken += [f"{scenario.name} [{way}] {text}" for way, texts in wrong.items() for text in texts[:2]]
    found.figures["scenarios"] = len(chosen)


def drawn(found: Findings, size: Size) -> None:
    """Judge recipes; all that is wrong is told, of however many."""
    from drawn import complaints, recipes

    judged = 0

    @_few(size, size.recipes, (Phase.generate,))
    @given(recipe=recipes(size.largest))
    def each(recipe: object) -> None:
        nonlocal judged
        judged += 1
        found.broken.extend(complaints(recipe, size.most))

    each()
    found.figures["recipes"] = judged


def lives(found: Findings, size: Size) -> None:
    """Let models live; the first step at which one is wrong ends its way."""
    from machine import WAYS, Life

    for way, orders in WAYS.items():
        kind = type("Life", (Life,), {"orders": orders})
        phases = (Phase.generate, Phase.shrink) if size.anew else (Phase.generate,)
        try:
            run_state_machine_as_test(kind, settings=_few(size, size.lives, phases))
        except Exception as error:
            steps = " ".join(note.strip() for note in getattr(error, "__notes__", []))
            found.broken.append(f"{way}: {error}; {steps}"[:900])
    found.figures["lives"] = f"{size.lives} of {size.steps} steps in each of {', '.join(WAYS)}"


MUTATIONS = [
    Mutation(
        "a posterior covariance explains a tenth of a thousandth too much",
        "ops/_shared/by_factor.py",
        "        own = evaluated(query.prior)",
        "        own = evaluated(query.prior) - 1e-4 * explained",
        "drawn",
    ),
]

if __name__ == "__main__":
    main({"table": table, "drawn": drawn, "lives": lives}, SIZES)
