"""The command line, in this process; and a profile of this machine, as large as a reader can judge."""

import pytest
from typer.testing import CliRunner

from autokern.cli.commands import app
from autokern.core.problem import Problem
from autokern.runtime import dispatch
from autokern.system import host
from autokern.tuning import store
from autokern.tuning.profile import Ban, Examined, Profile, Timing, Trial


@pytest.fixture
def run():
    """Run a command as a new process would."""

    def invoke(*arguments: object):
        dispatch.reset()
        return CliRunner().invoke(app, [*map(str, arguments)], prog_name="autokern")

    return invoke


@pytest.fixture
def profile() -> Profile:
    """In which CholeskyQR2 and tiles win from 100 columns on, with a ban, an exam, and a candidate's set-up."""

    def trial(faster: str, ratio: float, **problem):
        stock = Timing(1e-3 * problem["n"])
        return Trial(Problem(**problem), {"stock": stock, faster: Timing(stock.seconds * ratio, ratio, 0.01, 5)})

    ratios, kernels = {10: 2.0, 50: 1.4, 200: 0.7, 400: 0.5}, {"op": "kernel_matrix", "variant": "matern52/same/ard"}
    trials = [trial("choleskyqr2", ratio, op="qr", m=10 * n, n=n) for n, ratio in ratios.items()]
    for grad in ("", "theta"):
        trials += [trial("tiled", ratio, m=n, n=n, d=8, grad=grad, **kernels) for n, ratio in ratios.items()]
    trials.append(trial("tiled", 0.5, m=4000, n=4000, d=32, grad="theta/x", batch=256, **kernels))
    here = host.current()
    return Profile(
        host=here.fields,
        fingerprint=here.fingerprint,
        trials=trials,
        banned=[Ban("cholesky", "huge-pages", "float32", "cpu", "error 3 times its bound on a large condition")],
        setup={"exact_log_prob.graph": 2.5},
        exam=[Examined(task="a step of training, 100 points", seconds=1e-3, shipped=0.5, new=0.4, kept="stock")],
        fruitless={"predict/float64@cpu": "2026-01-02T03:04:05Z"},
        created="2026-01-02T03:04:05Z",
    )


@pytest.fixture
def measured(profile) -> Profile:
    """The same, kept."""
    store.save(dispatch.session().settings, profile)
    return profile
