"""The candidate `graph`; a function that runs again stands for a recording where there is no GPU."""

import threading

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator.utils.warnings import NumericalWarning
from support import fakes
from support.models import ExactModel, step
from support.outcomes import outcome
from support.tiling import KERNELS

import autokern
from autokern.backends import recorded as graphs
from autokern.core import state
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.core.settings import Settings
from autokern.model import marginal
from autokern.runtime import dispatch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])


@pytest.fixture(params=["cpu", ON_GPU])
def device(request, monkeypatch):
    """A device that records: a real one, or a CPU that runs the same function again into the same memory."""
    if request.param == "cpu":
        monkeypatch.setattr(graphs, "_capture", fakes.run_again)
    monkeypatch.setattr(graphs, "_failed", "")
    state.permitted.add("graphs")
    yield request.param
    graphs.forget()


def arguments(device, kernel=None, n=30, batch=(), noise=0.1, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    kernel = (kernel or ScaleKernel(MaternKernel(2.5, ard_num_dims=3))).to(dtype=dtype, device=device)
    x = torch.rand(*batch, n, 3, dtype=dtype).to(device).requires_grad_()
    mean = torch.zeros(*batch, n, dtype=dtype, device=device).requires_grad_()
    value = torch.randn(*batch, n, dtype=dtype).to(device)
    variances = torch.full((*batch, 1), noise, dtype=dtype, device=device).requires_grad_()
    prior = MultivariateNormal(mean, LazyEvaluatedKernelTensor(x, x, kernel=kernel))
    return (marginal.read(prior, variances), value, True), [x, mean, variances, *kernel.parameters()]


def density(name, args):
    return get("exact_log_prob")[name].run(*args)


@pytest.mark.parametrize("kind", ["scaled rbf", "scaled sum", "two shapes", "matern 1/2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_and_gradients_are_those_of_the_step_itself(device, kind, dtype):
    batch = torch.Size([2] * (kind == "matern 1/2"))
    for seed in (0, 1):  # the second one runs the recording of the first
        args, leaves = arguments(device, KERNELS[kind](batch), batch=batch, dtype=dtype, seed=seed)
        found, true = density("graph", args), density("fused", args)
        tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(found, true, **tolerance)
        weights = torch.rand_like(true)
        grads, exact = (torch.autograd.grad(out, leaves, weights) for out in (found, true))
        torch.testing.assert_close(grads, exact, **tolerance)


def test_a_result_is_not_changed_by_the_next_call(device):
    first, leaves = arguments(device, seed=0)
    kept = density("graph", first)
    before = kept.item()
    other, _ = arguments(device, seed=1)
    assert density("graph", other).item() != before
    assert kept.item() == before
    grads = torch.autograd.grad(kept, leaves, retain_graph=True)
    again = torch.autograd.grad(kept, leaves)
    torch.testing.assert_close(grads, again)
    torch.testing.assert_close(grads, torch.autograd.grad(density("fused", first), leaves))


def test_second_derivatives(device):
    args, leaves = arguments(device, n=8)
    found = []
    for name in ("graph", "fused"):
        (slope,) = torch.autograd.grad(density(name, args), leaves[2], create_graph=True)
        found.append(torch.autograd.grad(slope.sum(), leaves[2])[0])
    torch.testing.assert_close(*found)


def test_a_matrix_that_is_not_definite_is_treated_as_stock_treats_it(device):
    kernel = ScaleKernel(RBFKernel())
    kernel.base_kernel.lengthscale = 1e3
    args, _ = arguments(device, kernel, noise=0.0)
    fused, graph = (outcome(lambda name=name: density(name, args).item()) for name in ("fused", "graph"))
    assert fused == graph
    assert NumericalWarning in dict(graph[1])  # something was added to the diagonal


def counted(monkeypatch):
    """A list that grows with each recording."""
    made, capture = [], graphs._capture
    monkeypatch.setattr(graphs, "_capture", lambda run, where: made.append(1) or capture(run, where))
    return made


def twice(n, device):
    a = torch.ones(n, device=device)
    assert torch.equal(graphs.recorded("twice", lambda a: a + a, [a]), a + a)


def test_recordings_in_use_make_no_room_for_others(device, monkeypatch):
    made = counted(monkeypatch)
    for n in range(1, graphs._KEPT + 1):
        twice(n, device)
        twice(n, device)
    assert len(made) == graphs._KEPT
    for n in range(1, graphs._KEPT + 3):  # more shapes in turn than are kept: they run as they are
        twice(n, device)
    assert len(made) == graphs._KEPT
    for _ in range(graphs._FRESH):
        twice(2, device)
    twice(100, device)  # in place of the one that nobody asked for
    assert len(made) == graphs._KEPT + 1
    twice(2, device)
    assert len(made) == graphs._KEPT + 1
    assert len(graphs._recordings) == graphs._KEPT


def test_nothing_is_recorded_beside_another_thread(device, monkeypatch):
    made = counted(monkeypatch)
    goes, other = threading.Event(), None
    other = threading.Thread(target=lambda: (twice(4, device), goes.wait(60)))
    other.start()
    twice(4, device)
    assert not made
    goes.set()
    other.join()
    twice(4, device)
    assert len(made) == 1


def test_what_a_step_raises_ends_recording(device):
    def step(a):
        raise ValueError("not today")

    twice(3, device)
    with pytest.raises(ValueError, match="not today"):
        graphs.recorded("fails", step, [torch.ones(2, device=device)])
    assert "not today" in graphs.unavailable("cuda")
    assert not graphs._recordings
    twice(3, device)  # runs as it is
    assert not graphs._recordings


def test_precision_is_that_of_the_call(device, monkeypatch):
    made = counted(monkeypatch)
    twice(3, device)
    flags = torch.backends.cuda.matmul
    before, flags.fp32_precision = flags.fp32_precision, "tf32"
    try:
        twice(3, device)
    finally:
        flags.fp32_precision = before
    assert len(made) == 2

    def step(a):
        assert not torch.is_autocast_enabled(device)
        return 2 * a

    with torch.autocast(device, dtype=torch.bfloat16):
        graphs.recorded("plain", step, [torch.ones(2, device=device)])


def test_only_who_allows_it_gets_recordings(monkeypatch):
    assert "AUTOKERN_GRAPHS=on" in graphs.unavailable("cuda")
    monkeypatch.setenv("AUTOKERN_GRAPHS", "on")
    dispatch.reset()
    assert graphs.unavailable("cuda") is None
    dispatch.reset(Settings())
    assert graphs.unavailable("cuda") is not None


def test_who_is_served():
    state.permitted.add("graphs")
    candidate = get("exact_log_prob")["graph"]
    small = Problem(op="exact_log_prob", m=500, n=500, d=3, device="cuda", grad="theta", variant="rbf/cholesky")
    assert candidate.why_not(small) is None
    assert "CUDA" in candidate.why_not(small.replace(device="cpu"))
    assert "large" in candidate.why_not(small.replace(m=5000, n=5000))
    assert candidate.compiles  # chosen only where so many steps are to come that recording repays itself


@pytest.mark.gpu
@needs_gpu
def test_recordings_survive_each_other_on_a_gpu():
    state.permitted.add("graphs")
    cases = [arguments("cuda", n=n, seed=n) for n in (300, 1000, *range(20, 20 + graphs._KEPT))]
    for _ in range(3):
        for args, leaves in cases:
            found, true = density("graph", args), density("fused", args)
            torch.testing.assert_close(found, true)
            torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(true, leaves))
        torch.cuda.empty_cache()
    assert not graphs._failed


@pytest.mark.gpu
@needs_gpu
def test_a_capture_that_fails_leaves_the_gpu_as_it_was(monkeypatch):
    monkeypatch.setattr(graphs, "_failed", "")
    state.permitted.add("graphs")
    graphs.forget()  # what other tests recorded leaves no room
    runs, here = [], torch.cuda.current_stream()

    def step(a):
        runs.append(1)
        return a * a.sum().item() if len(runs) > graphs._WARM else a

    with pytest.raises(RuntimeError):
        graphs.recorded("reads back", step, [torch.ones(4, device="cuda")])
    assert torch.cuda.current_stream() == here
    assert torch.randn(100, device="cuda").isfinite().all()
    assert torch.equal(graphs.recorded("plain", torch.neg, [torch.ones(2, device="cuda")]).cpu(), -torch.ones(2))


@pytest.mark.gpu
@needs_gpu
def test_a_model_trains_by_recorded_steps_on_a_gpu(monkeypatch):
    monkeypatch.setenv("AUTOKERN_GRAPHS", "on")
    dispatch.reset()
    torch.manual_seed(0)
    x, y = torch.rand(60, 2, device="cuda", dtype=torch.float64), torch.randn(60, device="cuda", dtype=torch.float64)
    losses = {}
    for force in ({"exact_log_prob": "fused"}, {"exact_log_prob": "graph"}):
        likelihood = gpytorch.likelihoods.GaussianLikelihood().double().cuda()
        model = ExactModel(x, y, likelihood=likelihood).double().cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        before = autokern.stats().get("exact_log_prob", {})
        with autokern.enabled(), autokern.using(force=force):
            for _ in range(20):
                loss, _ = step(model)
                optimizer.step()
            name = force["exact_log_prob"]
            assert autokern.stats()["exact_log_prob"] == {**before, name: before.get(name, 0) + 20}
        losses[str(force)] = loss.item()
    one, other = losses.values()
    assert one == pytest.approx(other, rel=1e-8)
