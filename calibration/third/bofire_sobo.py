"""BoFire: a `SoboStrategy` on Himmelblau's function, as in its tutorials, 8 random points and 5 steps."""

import bofire.strategies.api as strategies
import torch
from bofire.benchmarks.api import Himmelblau
from bofire.data_models.strategies.api import RandomStrategy, SoboStrategy

torch.manual_seed(0)
benchmark = Himmelblau()
first = strategies.map(RandomStrategy(domain=benchmark.domain, seed=0)).ask(8)
strategy = strategies.map(SoboStrategy(domain=benchmark.domain, seed=0))
strategy.tell(benchmark.f(first, return_complete=True))
for _ in range(5):
    strategy.tell(benchmark.f(strategy.ask(1), return_complete=True))
print("final", *strategy.experiments["y"])
