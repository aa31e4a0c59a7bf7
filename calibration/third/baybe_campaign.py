"""BayBE: a `Campaign` of three rounds on a grid of two parameters."""

import numpy as np
import torch
from baybe import Campaign
from baybe.parameters import NumericalDiscreteParameter
from baybe.searchspace import SearchSpace
from baybe.targets import NumericalTarget

torch.manual_seed(0)
np.random.seed(0)
grid = tuple(np.linspace(-4.0, 4.0, 21))
space = SearchSpace.from_product([NumericalDiscreteParameter(name, grid) for name in ("x", "y")])
campaign = Campaign(space, NumericalTarget("f", minimize=True).to_objective())
measured = space.discrete.exp_rep.sample(6, random_state=0).reset_index(drop=True)
for _ in range(4):
    measured["f"] = (measured.x**2 + measured.y - 11) ** 2 + (measured.x + measured.y**2 - 7) ** 2
    campaign.add_measurements(measured)
    measured = campaign.recommend(batch_size=2)
print("final", *campaign.measurements["f"])
