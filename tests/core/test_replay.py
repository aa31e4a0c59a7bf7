"""What a recorder may replay, and that replays compute bit for bit what the code would."""

import ctypes
import threading
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.programs import said

from autokern.core.replay import Ran, recording
from autokern.core.replay.operations import ChangedError, Copies, Replay, UnrecordedError
from autokern.core.replay.recording import Recorder

Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True, params=[0, 2**21], ids=["shared", "apart"])
def _results(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let results of different times share memory, or lie apart."""
    monkeypatch.setattr(recording, "_IN_CACHE", request.param)


def recorded(f: Function, x: torch.Tensor) -> tuple[Replay, list[torch.Tensor]]:
    recorder = Recorder(x)
    with recorder:
        value = f(x)
        (slope,) = torch.autograd.grad(value.sum(), x, allow_unused=True)
    results = [value.detach(), slope]
    return recorder.replay(*results), results


def eager(f: Function, x: torch.Tensor) -> list[torch.Tensor]:
    """Compute the same at a copy of the points."""
    x = x.detach().clone().requires_grad_(True)
    value = f(x)
    return [value.detach(), torch.autograd.grad(value.sum(), x)[0]]


def points(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_(True)


NUMBERS = np.zeros(4)
HELD = torch.linspace(0.5, 2.0, 12, dtype=torch.float64).reshape(4, 3)


def factored(x: torch.Tensor) -> torch.Tensor:
    gram = x @ x.mT + torch.eye(x.shape[-2], dtype=x.dtype)
    factor, info = torch.linalg.cholesky_ex(gram)
    if info.any():
        raise ValueError
    return torch.linalg.solve_triangular(factor, x, upper=False).square().sum(-1)


def in_place(x: torch.Tensor) -> torch.Tensor:
    kept = torch.zeros(x.shape, dtype=x.dtype)
    before = kept + 1  # a constant of memory that is written afterwards
    kept[..., 0] = x[..., 0]
    kept.mul_(2).add_(x)
    return (kept * before).sum(-1)


def branched(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1).exp() if x.max() < 2 else x.sum(-1).sin()


def indexed(x: torch.Tensor) -> torch.Tensor:
    order = x[..., 0].argsort()
    return torch.cat([x[order], x.expand(2, *x.shape).sum(0)]).index_select(-1, torch.tensor([2, 0])).sum(-1)


CASES: dict[str, Function] = {
    "plain": lambda x: (x * HELD.to(x)).sin().sum(-1),
    "views": lambda x: x.mT.reshape(2, 6).unsqueeze(0).expand(3, 2, 6).sum((0, 2)),
    "lapack": factored,
    "in place": in_place,
    "branch": branched,
    "indices": indexed,
    "split": lambda x: torch.cat([part.exp().cumsum(-1) for part in x.split(1, -2)]).sum(-1),
    "where": lambda x: torch.where(x > 0.5, x.log1p(), -x).logsumexp(-1),
    "mask": lambda x: x.masked_fill(x < 0.3, 0.0).softmax(-1).max(-1).values,
    "dtype": lambda x: x.to(torch.float32).exp().double().sum(-1),
    "linear": lambda x: (x * 3).sum(-1),
    "second order": lambda x: torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)[0].sum(-1),
    "batch": lambda x: torch.bmm(x.expand(5, 4, 3), x.mT.expand(5, 3, 4)).diagonal(dim1=-2, dim2=-1).sum(-1),
    "squeezed": lambda x: x.unsqueeze(-1).max(-1).values.unsqueeze_(-1).squeeze_(-1).sum(-1),
    "empty": lambda x: torch.empty(5, 3, dtype=x.dtype).copy_(x.sum(0)).mul_(2).sum(-1),
    "numbers": lambda x: torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype).mul_(x[0]).sub_(0.5).sum() * x.sum(-1),
    "like": lambda x: torch.ones_like(x).sub_(x).clamp_min_(0.2).reciprocal().mean(-1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_a_replay_is_bit_for_bit_what_the_code_computes(name: str, dtype: torch.dtype) -> None:
    x = points(4, 3, dtype=dtype)
    replay, results = recorded(CASES[name], x)
    for seed in range(1, 6):
        x.data.copy_(points(4, 3, seed=seed, dtype=dtype))
        replay.run()
        for ours, theirs in zip(results, eager(CASES[name], x), strict=True):
            assert torch.equal(ours, theirs)


def definite_below(x: torch.Tensor) -> torch.Tensor:
    return x.mT @ x + torch.eye(3, dtype=x.dtype) - 2 * (x > 1.5).any()


def factor_or_nothing(x: torch.Tensor) -> torch.Tensor:
    factor, info = torch.linalg.cholesky_ex(definite_below(x))
    return factor.sum() if not info.any() else factor.sum() * 0


@pytest.mark.parametrize(
    ("f", "value", "told"),
    [
        (branched, 3.0, "False in place of True"),
        (lambda x: x[x > 1.5].sum() + x.sum(), 1.6, "shape"),
        (factor_or_nothing, 1.6, "False"),
        (lambda x: torch.linalg.cholesky(definite_below(x)).sum(), 1.6, "positive-definite"),
    ],
)
def test_another_branch_or_shape_and_a_failed_factorisation_are_noticed(f: Function, value: float, told: str) -> None:
    replay, results = recorded(f, x := points(4, 3))
    x.data.copy_(points(4, 3, seed=1))
    replay.run()
    assert all(map(torch.equal, results, eager(f, x)))
    x.data[1, 1] = value
    with pytest.raises(ChangedError, match=told):
        replay.run()
    x.data[1, 1] = 0.25  # it serves again
    replay.run()
    assert all(map(torch.equal, results, eager(f, x)))


def test_written_constants_are_noticed() -> None:
    weight = torch.ones(3, dtype=torch.float64)
    replay, _ = recorded(lambda x: (x * weight.exp()).sum(-1), points(4, 3))
    replay.run()
    weight.mul_(2)
    with pytest.raises(ChangedError, match="written since"):
        replay.run()


def writes(x: torch.Tensor) -> torch.Tensor:
    TALLY.add_(1)
    return x.sum(-1)


def warns(x: torch.Tensor) -> torch.Tensor:
    warnings.warn("near the border", UserWarning, stacklevel=1)
    return x.sum(-1).exp()


def outside(x: torch.Tensor) -> torch.Tensor:
    found = torch.empty(4, 3, dtype=x.dtype)
    found.numpy()[...] = x.detach().numpy() * 2  # as a kernel in C++ would
    return (x * found).sum(-1)


def behind(x: torch.Tensor) -> torch.Tensor:
    found = torch.empty(4, dtype=x.dtype)
    ctypes.memset(found.data_ptr(), 0, found.nbytes)  # as an extension in C++ does, behind torch's back
    return found.exp() + x.sum(-1)


@torch.library.custom_op("autokern_tests::total", mutates_args=())
def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


TALLY = torch.zeros(1)
SQUARE = torch.zeros(2, 2)
normed = torch.nn.functional.batch_norm


def test_what_was_written_outside_can_be_undone() -> None:
    """A computation that is refused has run; where it is not the program's own, its program must not see that."""
    norm, tally = torch.nn.BatchNorm1d(3, dtype=torch.float64), torch.zeros(2)
    of = [*norm.buffers(), tally]
    before, versions = [t.clone() for t in of], [t._version for t in of]
    with (recorder := Recorder(x := points(4, 3))):
        norm(x).sum().backward()
        tally.add_(1)
        tally[1].mul_(3)
    assert not any(map(torch.equal, of, before))
    recorder.undo()
    assert all(map(torch.equal, of, before))
    assert versions == [t._version for t in of]


def test_draws_go_on_in_their_order_and_a_seed_is_drawn_but_not_used() -> None:
    def seed() -> int:
        return int(torch.randint(0, 1000, (1,)).item())

    def f(x: torch.Tensor) -> torch.Tensor:
        torch.rand(2)  # of no use
        return x * torch.rand(1, dtype=x.dtype).uniform_() + torch.randn_like(x) if seed() >= 0 else x

    x = points(4, 3)
    with (recorder := Recorder(x, seeding=seed.__code__)):
        ours = f(x)
    replay = recorder.replay(ours)
    assert recorder.draws
    for number in range(3):
        torch.manual_seed(number)
        replay.run()
        state = torch.get_rng_state()
        torch.manual_seed(number)
        assert torch.equal(ours, f(x))
        assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x: (x + torch.randn_like(x)).sum(-1), "random"),
        (lambda x: torch.nn.functional.dropout(x, 0.5).sum(-1), "random"),
        (writes, "memory of others"),
        (lambda x: x.sum(-1) + torch.from_numpy(NUMBERS).copy_(x.detach()[:, 0]).sum(), "memory of others"),
        (lambda x: x.sum(-1) + SQUARE.t_()[0, 1], "a tensor of others"),
        (lambda x: normed(x, x.new_zeros(3), x.new_ones(3), training=True).sum(-1), "running statistics"),
        (lambda x: x.to_sparse().to_dense().sum(-1), "another kind"),
        (outside, "leave torch"),
        (lambda x: x * max(x.detach().view(-1).tolist()), "leave torch"),
        (lambda x: x * float(x.detach().exp().numpy().max()), "leave torch"),
        (lambda x: x * float(np.asarray(x.detach()).max()), "leave torch"),
        (lambda x: x.sum(-1) * torch.tensor([v > 0.5 for v in x.detach()[:, 0]]), "leave torch"),
        (lambda x: x.sum(-1) * torch.tensor(data=(tuple(v for v in x.detach()[:, 0]),)), "leave torch"),
        (lambda x: x.sum(-1) * torch.as_tensor(list(x.detach()[:, 0])), "leave torch"),
        (lambda x: x.sum(-1) * torch.asarray(list(x.detach()[:, 0])), "leave torch"),
        (lambda x: x.sum(-1) * x.new_tensor(list(x.detach()[:, 0])), "leave torch"),
        (lambda x: x.sum(-1) * torch.DoubleTensor(list(x.detach()[:, 0])), "leave torch"),
        (lambda x: x.sum(-1) * torch.arange(8)[([(7 * v).long() for v in x.detach()[:, 0]],)], "leave torch"),
        (lambda x: x * len(str(x)), "leave torch"),
        (lambda x: x.sum(-1) * x.detach()[0].clone().apply_(abs)[0], "leave torch"),
        (lambda x: x.sum(-1) * x.detach()[0].tensor_split((x[:1, 0] > 0).long())[0].sum(), "leave torch"),
        (lambda x: total(x) + x.sum(), "may do more"),
        (lambda x: torch.view_as_real(x.to(torch.complex128)).sum((-1, -2)), "another kind"),
        (lambda x: (x.reshape(-1, 1, 1) * torch.ones(1, 1000, 1000)).sum((-1, -2)), "large"),
        (behind, "outside of torch"),
        (lambda x: torch.ones(4, requires_grad=True).sum(), "depends on an input"),
    ],
)
def test_what_cannot_be_replayed_runs_and_is_refused(f: Function, reason: str) -> None:
    x = points(4, 3)
    recorder = Recorder(x)
    state = torch.get_rng_state()
    with recorder:
        ours = f(x)
    torch.set_rng_state(state)
    assert torch.equal(ours, f(x))
    with pytest.raises(UnrecordedError, match=reason):
        recorder.replay(ours)


def limited(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.embedding(torch.arange(4), weights, max_norm=1.0) * x).sum(-1)


def test_norms_of_a_parameter_are_limited_in_a_replay_too() -> None:
    weights = torch.nn.Parameter(points(4, 3))
    with (recorder := Recorder(x := points(4, 3), weights)):
        ours = limited(x, weights).detach()
    replay = recorder.replay(ours)
    for size in (0.1, 5.0):
        with torch.no_grad():
            weights.copy_(size * points(4, 3, seed=2))
        theirs = limited(x, expected := weights.detach().clone())
        if size > 1.0:
            weights.data = weights.data.clone()
        assert recorder.copies.take()
        replay.run()
        assert torch.equal(ours, theirs)
        assert torch.equal(weights, expected)
    weights.data = weights.data[:2]
    assert not recorder.copies.take()


def test_what_others_have_is_written_by_no_replay() -> None:
    weights = 0.1 * points(4, 3)
    with (recorder := Recorder(x := points(4, 3))):
        ours = limited(x, weights)
    (replay := recorder.replay(ours)).run()
    weights.mul_(1.0)  # the same numbers
    replay.run()
    weights.mul_(1.01)
    with pytest.raises(ChangedError, match="False in place of True"):
        replay.run()
    with (recorder := Recorder(x)):
        ours = limited(x, weights.mul_(20.0))
    with pytest.raises(UnrecordedError, match="memory of others"):
        recorder.replay(ours)


def test_warnings_are_noted_and_passed_on_but_not_those_of_another_thread() -> None:
    with pytest.warns(UserWarning, match="near the border"), (ran := Ran()):
        warns(points(4, 3))
    assert ran.has_warned
    thread = threading.Thread(target=warns, args=(points(4, 3),))
    with pytest.warns(UserWarning, match="near the border"), (ran := Ran()):  # noqa: PT031
        thread.start()
        thread.join()
    assert not ran.has_warned


def test_errors_of_the_code_pass_unchanged() -> None:
    recorder = Recorder(x := points(4, 3))
    with pytest.raises(ZeroDivisionError), recorder:
        x.sum().item() / 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_parameters_that_are_read_in_place_are_not_written() -> None:
    """Parts of one storage, two that share theirs, and two that are empty, which have no address."""
    base, own = torch.zeros(4), torch.zeros(3)
    parameters = [*map(torch.nn.Parameter, (base[:2], base[2:], own, own, torch.empty(0), torch.empty(0)))]
    before = [p._version for p in parameters]
    copies = Copies(parameters)
    assert copies.take()
    assert [p._version for p in parameters] == before
    parameters[3].data = torch.ones(3)
    assert not copies.take()


@pytest.mark.slow
def test_the_compiler_is_not_imported() -> None:
    code = (
        "import sys, torch\nfrom autokern.core.replay.recording import Recorder\n"
        "x = torch.ones(3, requires_grad=True)\n"
        "before = set(sys.modules)\nwith (r := Recorder(x)):\n    y = x.exp().sum()\n"
        "r.replay(y).run(); print([m for m in set(sys.modules) - before if 'dynamo' in m])"
    )
    assert said(code) == ["[]"]
