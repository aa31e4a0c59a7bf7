"""learning.py on the real ops: what the caller sees while candidates are compared at every call is what stock gives."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

from autokern.core.arguments import tensors_in
from autokern.core.op import inside
from autokern.core.registry import registered
from autokern.core.settings import Settings
from autokern.hooks import install
from autokern.runtime import dispatch, learning
from autokern.tuning import policy

_MOST = 40_000
"""Elements of a problem that a test takes."""


def _problems(op, dtype):
    """The smallest problems of an op, one for each kind of gradients and each variant."""
    found = {}
    for problem in sorted(op.grid("full", dtype, "cpu"), key=lambda p: p.batch * p.m * p.n * max(1, p.d)):
        if problem.batch * problem.m * problem.n <= _MOST and not op.approximates(problem):
            found.setdefault((problem.grad, problem.variant, problem.batch > 1), problem)
    return list(found.values())


CASES = [(op.name, p) for op in registered() for dtype in ("float64", "float32") for p in _problems(op, dtype)]


@pytest.fixture
def eager(monkeypatch):
    """Every call compares all candidates, as if all were uncertain and there was time for it."""
    for name, value in {"_OF_CASE": 1e9, "_OF_PROCESS": 1e9, "_SAVING": 0.0, "_OVERRUN": 1e9}.items():
        monkeypatch.setattr(learning, name, value)

    def all_of_them(op, problem, chosen, source, feasible, estimates, learnt):
        usual = [c for c in feasible if not c.compiles and c.accuracy != "approximate" and c is not chosen]
        return tuple(c.name for c in usual)

    monkeypatch.setattr(policy, "contenders", all_of_them)


def _states(args):
    """Leaves with what a program could see of them."""
    return [(t, None if t.grad is None else t.grad.clone(), t._version) for t in tensors_in(args) if t.is_leaf]


def _leaves(args):
    return list({id(t): t for t in tensors_in(args) if t.requires_grad}.values())


def _found(op, problem, run, args):
    """Results and gradients as a caller reads them."""
    with torch.set_grad_enabled(bool(problem.grad)):
        out = op.materialize(run(*args))
        values = list(tensors_in(op.canonical(out)))
    if not problem.grad:
        return [t.detach().clone() for t in values]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.rand(t.shape, generator=generator).to(t) for t in values]
    graded = [(t, w) for t, w in zip(values, weights, strict=True) if t.requires_grad]
    leaves = _leaves(args)
    slopes = torch.autograd.grad(
        [t for t, _ in graded], leaves, [w for _, w in graded], retain_graph=True, allow_unused=True
    )
    return [t.detach().clone() for t in (*values, *(g for g in slopes if g is not None))]


@pytest.mark.parametrize(("name", "problem"), CASES, ids=[str(problem) for _, problem in CASES])
def test_a_call_on_which_candidates_are_compared_gives_what_it_gives_without(eager, name, problem, tmp_path):
    (op,) = (op for op in registered() if op.name == name)
    args, call = op.sample(problem, torch.Generator().manual_seed(3)), dispatch.route(op)
    dispatch.reset(Settings(calibrate="never", home=tmp_path, learn="off"))
    torch.manual_seed(11)
    plain = _found(op, problem, call, args)
    made, state = dispatch.stats(), torch.random.get_rng_state()
    here = dispatch.reset(Settings(calibrate="never", home=tmp_path, learn="record"))
    states, mode = _states(args), torch.is_grad_enabled()
    torch.manual_seed(11)
    again = _found(op, problem, call, args)
    (entry,) = here.memo[name].values()
    if entry.case is not None and entry.case.warm and not entry.case.calls:  # long calls warm up at the first
        made[name] = dict.fromkeys(made[name], 2)
        torch.manual_seed(11)
        again = _found(op, problem, call, args)
    if name == "task_log_prob":  # its stock reads the diagonal of the noise alone: gradients differ off it
        assert not entry.case.open
    elif entry.case is not None:  # there is another candidate
        assert entry.case.calls == 1
        assert len(entry.case.rounds) in (1, learning._TURNS)
        assert not here.learning._banned
    assert dispatch.stats() == made
    assert torch.is_grad_enabled() is mode
    assert not inside.active
    assert not inside.measuring
    assert torch.equal(torch.random.get_rng_state(), state)
    for tensor, grad, version in states:
        assert tensor._version == version
        assert grad is None or tensor.grad is not None
    eps = 2.0**-52 if problem.dtype == "float64" else 2.0**-23
    for one, other in zip(again, plain, strict=True):
        assert torch.allclose(one, other, rtol=100 * eps, atol=100 * eps * (1 + float(other.abs().max())))


class _Deep(gpytorch.models.ExactGP):
    """A deep kernel whose program looks at the gradients of its features."""

    def __init__(self, x, y):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.net, self.mean = torch.nn.Linear(3, 2), gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        self.features = self.net(x)
        self.features.retain_grad()
        return MultivariateNormal(self.mean(self.features), self.kernel(self.features))


def _gradients(steps):
    torch.manual_seed(0)
    x, y = torch.rand(20, 3), torch.rand(20)
    model = _Deep(x.double(), y.double()).double()
    mll, found = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model), []
    for _ in range(steps):
        model.zero_grad()
        mll(model(*model.train_inputs), model.train_targets).backward()
        found += [model.features.grad, *(p.grad for p in model.parameters())]
    return found


def test_gradients_that_a_program_retains_have_nothing_of_comparisons(eager, tmp_path):
    stock = _gradients(4)
    with install.enabled():
        here = dispatch.reset(Settings(calibrate="never", home=tmp_path, learn="record"))
        for one, other in zip(_gradients(4), stock, strict=True):
            assert torch.allclose(one, other, rtol=1e-6)
    assert here.learning._cases
