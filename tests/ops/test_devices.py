"""What holds on every device: results within each op's bound, models the same, no hidden waiting for a GPU.

On a CPU, where other tests go deeper, this is a check of the tests themselves; on a machine with a GPU, all of it.
"""

import sys
import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from support.models import ExactModel, step

import autokern
from autokern.backends import recorded as graphs
from autokern.core import state
from autokern.core.errors import MemoryBudgetError
from autokern.core.op import tensors_in
from autokern.core.registry import get, registered
from autokern.core.state import inside
from autokern.tuning.measuring import gradient_errors, trial

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
OPS = [op.name for op in registered() if op.name.isidentifier()]
MOST = 500 if "support.gpu_on_cpu" in sys.modules else 100_000
"""Largest dimension of a problem: the CPU that plays a GPU copies every operand."""


def problems(op, device, dtype):
    """Some of what a calibration measures: of each variant, gradient and batch the smallest; few of them on a CPU."""
    found = {}
    for problem in sorted(op.grid("full", dtype, device), key=lambda p: p.batch * p.m * p.n):
        small = problem.replace(m=min(problem.m, MOST), n=min(problem.n, MOST))
        found.setdefault((problem.words, problem.grad, problem.batch > 1), small)
    return list(found.values())[: 2 if device == "cpu" else None]


@pytest.fixture
def with_graphs():
    state.permitted.add("graphs")
    yield
    graphs.forget()


@on_every_device
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch, where a backward pass is a process's first work
@pytest.mark.usefixtures("with_graphs")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPS)
def test_every_candidate_keeps_its_bound(name, dtype, device):
    op = get(name)
    for problem in problems(op, device, dtype):
        args = op.sample(problem, torch.Generator().manual_seed(3))
        inside.active = True
        stock = trial(op, op.stock.run, problem, args)()
        places = [t.device for t in tensors_in((stock.out,))]
        for candidate in op.feasible(problem):
            if candidate.accuracy == "approximate" or (candidate.compiles and candidate.name != "graph"):
                continue
            told = trial(op, candidate.run, problem, args)()
            assert [t.device for t in tensors_in((told.out,))] == places, candidate.name
            if not candidate.as_stock:
                assert op.check(problem, told.out, args) <= 1, (candidate.name, problem)
                assert gradient_errors(op, problem, args, stock)(told) <= 1, (candidate.name, problem)
        inside.active = False


def a_life(device):
    """Train, predict and update a model; return what came of it."""
    torch.manual_seed(0)
    x = torch.rand(80, 2, dtype=torch.float64).to(device)
    y = torch.sin(5 * x).sum(-1)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double().to(device)
    model = ExactModel(x, y, ScaleKernel(MaternKernel(2.5)), likelihood).double().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(10):
        loss, _ = step(model)
        optimizer.step()
    model.eval(), likelihood.eval()
    new = torch.rand(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        first = likelihood(model(new))
        found = [loss, first.mean, first.variance]
        later = model.get_fantasy_model(new[:2], torch.zeros(2, dtype=torch.float64, device=device))(new)
        return [*found, later.mean, later.variance]


@on_every_device
@pytest.mark.parametrize("order", [None, "random:1", "random:2"])
def test_a_model_lives_the_same_life(device, order):
    stock = a_life(device)
    with autokern.enabled(), autokern.using(force=order):
        ours = a_life(device)
    for one, other in zip(stock, ours, strict=True):
        assert one.device == other.device
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@on_every_device
def test_what_does_not_fit_is_refused_before_it_is_tried(device):
    lazy = ScaleKernel(MaternKernel(2.5)).to(device)(torch.rand(400_000, 2, device=device))
    with autokern.enabled(), autokern.using(memory="64GiB"), pytest.raises(MemoryBudgetError, match="GiB"):
        lazy.to_dense()


WAITS = {"kernel_matrix": 3, "kernel_matmul": 3, "exact_log_prob": 3}
"""How often the candidates of an op ask a GPU, at most, for each matrix of a product: how far points lie from their
centre, whether two sets of points are one, whether a scale can be divided by; whether a factorisation, an inverse and
a result went well."""


@pytest.mark.gpu
@needs_gpu
@pytest.mark.usefixtures("with_graphs")
@pytest.mark.parametrize("name", WAITS)
def test_nothing_waits_for_the_gpu_unseen(name):
    op = get(name)
    for problem in problems(op, "cuda", "float64"):
        args = op.sample(problem, torch.Generator().manual_seed(3))
        for candidate in op.feasible(problem):
            waits = candidate.name in ("stock", "cpu", "matrix-free")
            if waits or candidate.compiles or candidate.accuracy == "approximate":
                continue
            call = trial(op, candidate.run, problem, args)
            call()
            torch.cuda.synchronize()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    call()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            waits = [w for w in caught if "called a synchronizing" in str(w.message)]
            told = candidate.name, problem, [str(w.message) for w in waits]
            assert len(waits) <= WAITS[name] * (problem.batch if name == "kernel_matmul" else 1), told
