"""Two ranks with different orders: each tells the orders in force in a block of ranks, and after it."""

import os
import sys

import autokern
from autokern.runtime import dispatch

os.environ["AUTOKERN_FORCE"] = "qr=cpu" if os.environ["RANK"] == "1" else "cholesky=stock"
autokern.enable()
with autokern.ranks(timeout=120):
    agreed = dispatch.session().settings
    sys.stdout.write(f"found {agreed.force} {agreed.learn} {agreed.calibrate} {agreed.memory}\n")
sys.stdout.write(f"found {dispatch.session().settings.force[0][0]}\n")
