"""Xopt: `ExpectedImprovementGenerator` on a sine with a constraint, 4 random points and 6 steps."""

import numpy as np
import torch
from xopt import VOCS, Evaluator, Xopt
from xopt.generators.bayesian import ExpectedImprovementGenerator

vocs = VOCS(variables={"x": [0.0, 2 * np.pi]}, objectives={"f": "MINIMIZE"}, constraints={"c": ["LESS_THAN", 0.0]})


def function(inputs: dict) -> dict:
    return {"f": np.sin(inputs["x"]), "c": 0.9 * np.sin(inputs["x"] + np.pi) - 0.5}


np.random.seed(0)
torch.manual_seed(0)
generator = ExpectedImprovementGenerator(vocs=vocs)
generator.gp_constructor.use_low_noise_prior = True
optimiser = Xopt(evaluator=Evaluator(function=function), generator=generator, vocs=vocs)
optimiser.random_evaluate(4, seed=0)
for _ in range(6):
    optimiser.step()
print("final", *optimiser.data["f"])
