"""Two ranks with other orders and profiles: what each decides alone and among ranks, and the orders in force."""

import os
import sys

import autokern
from autokern.core.problem import Problem
from autokern.runtime import dispatch
from autokern.tuning.chooser import fitted
from autokern.tuning.profile import Profile, Timing, Trial

os.environ["AUTOKERN_FORCE"] = "qr=cpu" if os.environ["RANK"] == "1" else "cholesky=stock"
autokern.enable()
tiled = Timing(80.0, 10.0, 0.01, 9) if os.environ["RANK"] == "1" else Timing(0.1, 0.0125, 0.01, 9)
timings = {"stock": Timing(8.0), "tiled": tiled}
asked = {"m": 3000, "n": 3000, "d": 3, "rhs": 11, "variant": "rbf/cross"}
trial = Trial(Problem(op="kernel_matmul", dtype="float64", device="cpu", **asked), timings)
host = dispatch.session().profile.host
dispatch.session().adopt(fitted(Profile(host=host, trials=[trial], created="2026-01-01T00:00:00Z")))
sys.stdout.write(f"found before {autokern.explain('kernel_matmul', **asked).candidate}\n")
with autokern.ranks(timeout=120):
    agreed = dispatch.session().settings
    sys.stdout.write(f"found decision {autokern.explain('kernel_matmul', **asked).candidate}\n")
    sys.stdout.write(f"found {agreed.force} {agreed.calibrate} {agreed.memory}\n")
sys.stdout.write(f"found {dispatch.session().settings.force[0][0]}\n")
