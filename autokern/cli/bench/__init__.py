"""Bench: measures what autokern's choices are worth on this machine.

`regret` times the chosen candidate of random problems against all others, `kernel_matrices` every way to a kernel
matrix against stock, `end_to_end` real models with autokern off and on. Studies reuse `random_problems` and `regret`.
"""

from autokern.cli.bench.end_to_end import Workload, end_to_end
from autokern.cli.bench.everything import Benchmark, everything
from autokern.cli.bench.kernel_matrices import Cell, kernel_matrices
from autokern.cli.bench.problems import contenders, random_problems
from autokern.cli.bench.regret import Row, Verdict, regret, verdict

__all__ = [
    "Benchmark",
    "Cell",
    "Row",
    "Verdict",
    "Workload",
    "contenders",
    "end_to_end",
    "everything",
    "kernel_matrices",
    "random_problems",
    "regret",
    "verdict",
]
