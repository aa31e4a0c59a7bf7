"""learning.py: what is uncertain and used often is compared on the calls themselves, in a small share of their time."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import gpytorch
import msgspec
import pytest
import torch

import autokern
from autokern.core.feasibility import Feasibility
from autokern.core.op import inside
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.runtime import beside, dispatch, drift, learning
from autokern.system import host, memory_limit
from autokern.tuning import contenders, policy, store
from autokern.tuning.cost_model import CostModel
from autokern.tuning.profile import Profile, Timing, Trial

A = torch.ones(4, 4, dtype=torch.float64)


class Clock:
    """Moved by the candidates alone."""

    now = 1000.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (learning, drift.timer):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(drift.timer, "_switches", lambda: 0)
    return clock


class Made(SimpleNamespace):
    """An op, how often each function ran, how slow it is, and what it returns."""

    def served(self):
        return dispatch.stats()[self.op.name]

    def extra(self, name, calls):
        """How often a function ran beside the calls it served."""
        return self.calls[name] - self.served().get(name, 0)


@pytest.fixture
def made(make_op, clock):
    calls, slowness = {}, {"stock": 1e-3, "fast": 5e-4, "slow": 3e-3}
    results = {}
    names = {"stock": 0, "fast": 1, "slow": 2}
    op = make_op(
        "learnt",
        problem_of=lambda a: Problem(op="learnt", m=a.shape[0], n=a.shape[1], grad="a" if a.requires_grad else ""),
    )

    def candidate(name):
        calls[name] = 0

        def run(a):
            calls[name] += 1
            clock.now += slowness[name]
            return results.get(name, lambda a: 2 * a)(a)

        op.candidate(name)(run)

    for name in names:
        candidate(name)
    return Made(op=op, calls=calls, slowness=slowness, results=results, clock=clock)


def uncertain(op, ratio=1.0, noise=0.5, sizes=(2, 4, 8), **ratios):
    """A profile in which all are as fast as stock, as far as is known."""
    here = host.current()
    timings = {"stock": Timing(1e-3)}
    for name in op.names()[1:]:
        r = ratios.get(name, ratio)
        timings[name] = Timing(1e-3 * r, r, noise, 1)
    trials = [Trial(Problem(op=op.name, m=n, n=n, grad=g), timings) for n in sizes for g in ("", "a")]
    return Profile(host=here.fields, fingerprint=here.fingerprint, trials=trials)


def settings(**orders):
    return Settings(calibrate="never", home=Path(os.environ["AUTOKERN_HOME"]), **orders)


def session(made, profile=None, **orders):
    here = dispatch.reset(settings(**orders))
    here.adopt(uncertain(made.op) if profile is None else profile)
    return dispatch.route(made.op)


def decision():
    ((found, _),) = dispatch.decisions()
    return found


def entry():
    ((found,),) = (table.values() for table in dispatch.session().memo.values())
    return found


def learns(made, call, calls=20000, a=A):
    """Call until something is learnt; return how many calls that took."""
    for number in range(calls):
        call(a)
        if decision().source == "learnt":
            return number + 1
    return 0


def test_what_is_faster_is_found_and_then_nothing_changes(made):
    call = session(made)
    call(A)
    first = decision()
    assert (first.candidate, set(first.contenders)) == ("stock", {"fast", "slow"})
    assert learns(made, call)
    found = decision()
    assert (found.candidate, found.contenders, found.review) == ("fast", (), 0)
    assert found.reason.startswith("learnt from ")
    assert found.reason.endswith(" of your calls: 2.00 times as fast as stock")
    assert found.margin == pytest.approx(2.0)
    assert entry().run is made.op["fast"].run  # the hot path is as before
    made.slowness["fast"] = 1e-2
    before = dict(made.calls)
    for _ in range(5000):
        call(A)
    assert decision().candidate == "fast"  # at most one change in a process
    assert made.calls == {**before, "fast": before["fast"] + 5000}


def test_nothing_begins_that_does_not_fit_the_shares(made, monkeypatch):
    call = session(made)
    learner = dispatch.session().learning
    began = made.clock.now
    for _ in range(20000):
        before = made.clock.now
        call(A)
        taken = made.clock.now - before
        elapsed = made.clock.now - began
        if taken > 2e-3:  # candidates were compared
            (case,) = learner._cases.values()
            beyond = 5e-3  # the first one finds that a candidate takes longer than expected
            assert learner._spent + learning._SAVING <= learning._OF_PROCESS * elapsed + beyond
            assert case.spent <= learning._OF_CASE * case.served + beyond
        if not entry().case.open:
            break
    assert decision().candidate == "fast"
    assert learner._spent > 0


def test_a_program_that_is_soon_over_is_left_alone(made):
    call = session(made)
    for _ in range(900):  # 0.9 s, of which the share is less than what saving takes
        call(A)
    assert made.calls == {"stock": 900, "fast": 0, "slow": 0}


def test_other_work_of_the_process_counts_for_its_share_and_not_for_that_of_the_key(made):
    call = session(made)
    for _ in range(100):
        call(A)
    made.clock.now += 1e4
    call(A)
    assert made.calls["fast"] == 0
    for _ in range(600):
        call(A)
    assert made.calls["fast"] > 0


def test_what_is_no_faster_is_settled_and_timed_no_more(made):
    made.slowness["fast"] = 9.9e-4
    call = session(made)
    for _ in range(30000):
        call(A)
        if not entry().case.open:
            break
    assert not entry().case.open
    assert decision().candidate == "stock"
    before = dict(made.calls)
    for _ in range(5000):
        call(A)
    assert made.calls == {**before, "stock": before["stock"] + 5000}


def test_a_choice_that_was_measured_by_chance_gives_way_to_stock(made):
    made.slowness["fast"] = 2e-3
    call = session(made, uncertain(made.op, noise=0.05, fast=0.8, slow=3.0))
    call(A)
    assert decision().candidate == "fast"
    entry().decision = msgspec.structs.replace(decision(), contenders=("stock",))
    entry().case = dispatch.session().learning._cases[decision().problem.coarse] = learning.Case(entry().decision)
    entry().check_at(2)
    assert learns(made, call)
    assert decision().candidate == "stock"


def test_what_is_clear_has_no_contenders(made):
    call = session(made, uncertain(made.op, noise=0.01, fast=0.5, slow=3.0))
    call(A)
    assert (decision().candidate, decision().contenders) == ("fast", ())


def test_a_default_that_was_never_measured_is_compared_with_stock(made, monkeypatch):
    monkeypatch.setattr(type(made.op), "default_candidate", lambda self, problem: "slow")
    here = host.current()
    call = session(made, Profile(host=here.fields, fingerprint=here.fingerprint))
    call(A)
    assert (decision().candidate, decision().contenders) == ("slow", ("stock",))
    assert learns(made, call)
    assert decision().candidate == "stock"


@pytest.mark.parametrize(
    "orders",
    [
        {"learn": "off"},
        {"deterministic": True},
        {"force": (("learnt", "slow"),)},
        {"random_seed": 3},
        {"exclude": frozenset({"fast", "slow"})},
    ],
    ids=["off", "deterministic", "forced", "random", "excluded"],
)
def test_orders_freeze_it(made, monkeypatch, orders):
    call = session(made, **orders)
    monkeypatch.setattr(learning.Learning, "_compare", lambda *args: pytest.fail("compared"))
    for _ in range(3000):
        call(A)


def test_a_pinned_profile_freezes_it(made, monkeypatch, tmp_path):
    path = tmp_path / "pinned.json"
    store.write_file(path, uncertain(made.op))
    dispatch.reset(Settings(profile=path))
    monkeypatch.setattr(learning.Learning, "_compare", lambda *args: pytest.fail("compared"))
    call = dispatch.route(made.op)
    for _ in range(3000):
        call(A)


def test_using_freezes_it(made, monkeypatch):
    call = session(made)
    monkeypatch.setattr(learning.Learning, "_compare", lambda *args: pytest.fail("compared"))
    with autokern.using(exclude=["slow"]):
        for _ in range(3000):
            call(A)


def test_what_a_block_orders_is_not_overruled_by_what_was_learnt(made):
    call = session(made)
    assert learns(made, call)
    with autokern.using(exclude=["fast"]):
        before = made.calls["stock"]
        call(A)
        assert made.calls["stock"] == before + 1
    with autokern.using(force={"learnt": "slow"}):
        before = made.calls["slow"]
        call(A)
        assert made.calls["slow"] == before + 1


def test_ranks_of_one_job_children_and_devices_do_not_learn(made, monkeypatch):
    monkeypatch.setattr(learning.Learning, "_compare", lambda *args: pytest.fail("compared"))
    for name in ("multi_rank", "forked"):
        call = session(made)
        with monkeypatch.context() as patch:
            patch.setattr(host, name, lambda: True)
            for _ in range(3000):
                call(A)


def test_a_job_that_becomes_one_of_several_ranks_stops_learning(made, monkeypatch):
    call = session(made)
    call(A)
    monkeypatch.setattr(learning.Learning, "_compare", lambda *args: pytest.fail("compared"))
    monkeypatch.setattr(host, "multi_rank", lambda: True)
    for _ in range(3000):
        call(A)


def test_no_comparison_without_the_memory_for_it(made, monkeypatch):
    asked = []
    monkeypatch.setattr(memory_limit, "fits", lambda need, device: asked.append(need) or False)
    call = session(made)
    for _ in range(3000):
        call(A)
    assert asked[0] >= 2 * made.op.stock.memory(decision().problem)
    assert made.calls == {"stock": 3000, "fast": 0, "slow": 0}


def test_while_another_thread_compares_none_does(made):
    call = session(made)
    with learning._comparing:
        for _ in range(3000):
            call(A)
    assert made.calls == {"stock": 3000, "fast": 0, "slow": 0}
    assert learns(made, call)


def test_threads_that_call_at_once_get_their_own_results(make_op):
    op = make_op("threaded")
    for name in ("stock", "fast"):
        op.candidate(name)(lambda a: 2 * a)
    here = dispatch.reset(settings())
    here.adopt(uncertain(op))
    here.learning._began -= 1e6
    call, wrong = dispatch.route(op), []

    def work(number):
        mine = torch.full((4, 4), float(number), dtype=torch.float64)
        wrong.extend(number for _ in range(3000) if not call(mine).equal(2 * mine))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 0 < sum(dispatch.stats()["threaded"].values()) <= 12000  # threads may count over each other
    assert not learning._comparing.locked()


def test_another_result_is_never_promoted(made, monkeypatch):
    said = []
    monkeypatch.setattr(learning._log, "info", lambda words, *what: said.append(words % what))
    made.results["fast"] = lambda a: 2.001 * a
    made.slowness["slow"] = 8e-4
    call = session(made)
    assert learns(made, call)
    assert decision().candidate == "slow"
    assert made.extra("fast", 0) == 1
    assert said[0] == "learnt.fast is left out from now on: beside stock it differs by 5e-04"


@pytest.mark.parametrize(
    "result",
    [lambda a: 1 / 0, lambda a: (2 * a).float(), lambda a: (2 * a)[:2], lambda a: 2 * a * float("nan")],
    ids=["raises", "dtype", "shape", "nan"],
)
def test_a_candidate_that_fails_is_left_out(made, result):
    made.results["fast"] = result
    call = session(made)
    for _ in range(8000):
        assert call(A).equal(2 * A)
    assert made.calls["fast"] == 1
    assert decision().candidate == "stock"


def as_better(made, *names):
    """Let candidates be exact where stock approximates."""
    made.op.listed[:] = [
        msgspec.structs.replace(c, accuracy="better") if c.name in names else c for c in made.op.listed
    ]


def test_what_is_exact_takes_the_place_of_what_is_exact_beside_a_stock_that_is_not(made):
    as_better(made, "fast", "slow")
    made.results["stock"] = lambda a: 2.01 * a
    call = session(made, uncertain(made.op, noise=0.1, fast=0.45, slow=0.4))
    call(A)
    assert decision().candidate == "slow"
    made.slowness["slow"] = 1.2e-3  # stock would be faster than that, too
    made.slowness["fast"] = 1.1e-3
    assert learns(made, call)
    assert decision().candidate == "fast"


def test_stock_does_not_give_way_to_what_gives_something_else_for_it_is_exact(made):
    as_better(made, "fast")
    made.results["fast"] = lambda a: 2.01 * a
    call = session(made)
    for _ in range(8000):
        call(A)
    assert decision().candidate == "stock"
    assert made.calls["fast"] == 1
    assert not dispatch.session().learning._banned


def test_results_without_numbers_say_nothing(made):
    call = session(made)
    for name in made.calls:
        made.results[name] = lambda a: a * float("inf")
    for _ in range(8000):
        call(A)
    assert entry().case.calls == 0
    assert not dispatch.session().learning._banned
    assert decision().candidate == "stock"


@pytest.mark.parametrize("kind", ["own class", "hooked", "all hooked", "own forward", "known"])
def test_modules_of_the_user_are_not_called_more_often(kind):
    class Own(gpytorch.kernels.RBFKernel):
        pass

    kernel = gpytorch.kernels.ScaleKernel(Own() if kind == "own class" else gpytorch.kernels.RBFKernel())
    if kind == "hooked":
        kernel.base_kernel.register_forward_hook(lambda *args: None)
    if kind == "own forward":
        kernel.base_kernel.forward = lambda *args, **options: A
    of_all = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    if kind != "all hooked":
        of_all.remove()
    lazy = gpytorch.lazy.LazyEvaluatedKernelTensor(A, A, kernel=kernel)
    prior = gpytorch.distributions.MultivariateNormal(torch.zeros(4, dtype=torch.float64), lazy)
    for args in ((kernel, A), (lazy,), ((prior, None),)):
        assert beside.harmless(args) is (kind == "known")
    of_all.remove()


def test_a_gradient_that_the_program_retains_is_its_own(made):
    features = (A.clone().requires_grad_() * 3).requires_grad_()
    assert beside.harmless((features,))
    features.retain_grad()
    assert not beside.harmless((features,))


def test_a_warning_that_was_heard_once_is_not_heard_once_more(made, monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # the test's own process may run others

    def warning(a):
        warnings.warn("of a candidate", stacklevel=1)
        return 2 * a

    made.results["fast"] = made.results["slow"] = warning
    call = session(made, learn="record")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        for _ in range(4000):
            warnings.warn("of the program", stacklevel=1)
            call(A)
    assert made.extra("fast", made.calls) > 1
    assert [str(warning.message) for warning in heard] == ["of the program"]


def test_where_the_choice_itself_fails_nothing_is_compared(made):
    call = session(made)
    for _ in range(600):
        call(A)
    made.results["stock"] = lambda a: 1 / 0
    for _ in range(3000):
        with pytest.raises(ZeroDivisionError):
            call(A)
    assert made.calls["fast"] == 0


def test_an_interrupt_in_the_middle_leaves_all_as_it_was(made):
    call = session(made)
    call(A)

    def interrupted(a):
        raise KeyboardInterrupt

    made.results["fast"] = interrupted
    torch.manual_seed(3)
    state, heard = torch.random.get_rng_state(), list(warnings.filters)

    def program():
        for _ in range(8000):
            call(A)

    with pytest.raises(KeyboardInterrupt):
        program()
    assert not learning._comparing.locked()
    assert not inside.active
    assert not inside.measuring
    assert torch.equal(torch.random.get_rng_state(), state)
    assert warnings.filters == heard
    del made.results["fast"]
    assert call(A).equal(2 * A)
    assert learns(made, call)


def test_the_caller_sees_nothing_of_it(made):
    def drawing(a):
        warnings.warn("drawn", stacklevel=1)
        return 2 * a + 0 * torch.rand(4, 4, dtype=a.dtype)

    made.results["fast"] = made.results["slow"] = drawing
    call = session(made)
    leaf = A.clone().requires_grad_()
    inner = leaf * 3
    calls = []
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(8000):
            out = call(inner)
            if decision().source == "learnt":
                break
            (slope,) = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
            assert slope.equal(torch.full_like(A, 6.0))
            calls.append(1)
    assert made.calls["fast"] > 1
    assert leaf.grad is None
    assert not inner.retains_grad
    assert torch.is_grad_enabled()
    assert torch.equal(torch.random.get_rng_state(), state) or made.served().get("fast")
    assert len(heard) <= made.served().get("fast", 0)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_arguments_with_hooks_of_the_user_are_not_used(made, kind):
    call = session(made)
    leaf, seen = A.clone().requires_grad_(), []
    getattr(leaf, kind)(lambda *grads: seen.append(1))
    for _ in range(4000):
        call(leaf)
    assert not seen
    assert made.calls["fast"] == 0


def test_a_hook_further_up_is_not_called(made):
    call = session(made)
    leaf, seen = A.clone().requires_grad_(), []
    inner = leaf * 3
    leaf.register_hook(lambda grad: seen.append(1))
    for _ in range(4000):
        call(inner)
    assert made.calls["fast"] > 0
    assert not seen


def test_nothing_is_compared_inside_a_backward_pass(made):
    call = session(made)

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a.clone()

        @staticmethod
        def backward(ctx, grad):
            for _ in range(4000):
                call(A)
            return grad

    leaf = A.clone().requires_grad_()
    Twice.apply(leaf).sum().backward()
    assert made.calls["fast"] == 0


def test_neighbouring_sizes_learn_together_and_change_together(made):
    call = session(made, uncertain(made.op, sizes=(16, 32, 64)))
    sizes = [torch.ones(n, 32, dtype=torch.float64) for n in (32, 33, 34, 35)]
    for _ in range(8000):
        for a in sizes:
            assert call(a).equal(2 * a)
        if any(found.source == "learnt" for found, _ in dispatch.decisions()):
            break
    found = {d.problem.m: (d.candidate, d.source) for d, _ in dispatch.decisions()}
    assert found == dict.fromkeys((32, 33, 34, 35), ("fast", "learnt"))
    assert len(dispatch.session().learning._cases) == 1
    assert autokern.explain("learnt", m=33, n=32).source == "learnt"


def test_a_size_that_the_winner_cannot_serve_keeps_its_choice(made):
    fast = made.op.listed[1]
    made.op.listed[1] = msgspec.structs.replace(fast, unsupported=lambda p: "odd" if p.m % 2 else None)
    call = session(made, uncertain(made.op, sizes=(16, 32, 64)))
    even, odd = (torch.ones(n, 32, dtype=torch.float64) for n in (32, 33))
    call(odd)
    for _ in range(20000):
        call(even)
    assert {d.problem.m: d.candidate for d, _ in dispatch.decisions()} == {32: "fast", 33: "stock"}


def test_a_memo_that_is_emptied_forgets_nothing_that_was_learnt(made):
    call = session(made)
    assert learns(made, call)
    dispatch.session().forget()
    call(A)
    assert entry().candidate.name == "fast"
    dispatch.session().adopt(uncertain(made.op, noise=0.01, slow=0.2, fast=3.0))
    call(A)
    assert entry().candidate.name == "fast"  # one change in a process


def test_a_choice_that_is_taken_anew_is_learnt_anew(made):
    call = session(made)
    for _ in range(2000):
        call(A)
    assert entry().case.calls
    dispatch.session().adopt(uncertain(made.op, noise=0.5, slow=0.3, fast=0.3, sizes=(4,)))
    call(A)
    assert entry().case is None or (entry().case.current, entry().case.calls) == (entry().candidate.name, 0)


def test_cases_are_bounded(made, monkeypatch):
    monkeypatch.setattr(learning, "_MOST_CASES", 20)
    call = session(made)
    for n in range(1, 15):
        for m in range(1, 15):
            call(torch.ones(m, n, dtype=torch.float64))
    assert len(dispatch.session().learning._cases) <= 20


def test_record_changes_nothing_now_and_the_next_process_begins_with_it(made):
    call = session(made, learn="record")
    for _ in range(20000):
        call(A)
        if not entry().case.open:
            break
    assert decision().candidate == "stock"
    assert made.served() == {"stock": made.served()["stock"]}
    here = dispatch.session()
    store.save(here.settings, uncertain(made.op))
    here.close()
    fresh = dispatch.reset(settings())
    (known,) = (t for t in fresh.profile.trials if t.calls)
    assert known.problem == Problem(op="learnt", m=4, n=4)
    assert known.timings["fast"].ratio == pytest.approx(0.5)
    call(A)
    found = decision()
    assert (found.candidate, found.source, found.contenders) == ("fast", "learnt", ())
    assert found.reason.endswith(f"learnt from {known.calls} of your calls")


def test_a_reset_keeps_what_was_learnt_only_if_the_time_for_it_is_there(made, monkeypatch):
    for share, kept in ((1e-9, False), (0.01, True)):
        call = session(made)
        assert learns(made, call)
        monkeypatch.setattr(learning, "_OF_PROCESS", share)
        fresh = dispatch.reset(settings())
        assert any(t.calls for t in fresh.profile.trials) is kept
        monkeypatch.setattr(learning, "_OF_PROCESS", 0.01)


def test_what_was_learnt_belongs_to_the_profile_that_the_choices_came_from(made):
    call = session(made, learn="record")
    for _ in range(4000):
        call(A)
    here, before = dispatch.session(), torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)  # at the end of the program, say: another host to the profiles
        here.close()
        assert host.current().fingerprint != here.profile.fingerprint
    finally:
        torch.set_num_threads(before)
    assert any(trial.calls for trial in dispatch.reset(settings()).profile.trials)


def test_where_the_choice_is_left_out_by_another_case_nothing_is_compared(made):
    call = session(made)
    call(A)
    dispatch.session().learning._banned.add(("learnt", "stock"))
    for _ in range(4000):
        call(A)
    assert not entry().case.open
    assert made.calls["fast"] == 0


def test_what_several_processes_learn_adds_up():
    problem = Problem(op="qr", m=100, n=10)
    one = Trial(problem, {"stock": Timing(1e-3), "cpu": Timing(8e-4, 0.8, 0.02, 4), "other": Timing(1e-3)}, 3)
    case = learning.Case(policy.Decision(problem=problem, candidate="stock", reason="", source="measured"))
    case.names.append("cpu")
    case.rounds, case.calls = [{"stock": 1e-3, "cpu": 9e-4}] * 10, 5
    found = case.trial(lambda asked: one)
    assert (found.calls, found.timings["cpu"].rounds) == (8, 14)
    assert 0.8 < found.timings["cpu"].ratio < 0.9
    assert found.timings["cpu"].noise < 0.02
    assert "other" in found.timings


def test_merging_keeps_learnt_results_their_calls_and_the_errors_of_calibrations():
    problem = Problem(op="qr", m=100, n=10)
    measured = Trial(problem, {"stock": Timing(1e-3), "a": Timing(1e-3, 1.0, 0.1, 3, error=0.25), "b": Timing(2e-3)})
    learnt = Trial(problem, {"stock": Timing(2e-3), "a": Timing(1e-3, 0.5, 0.01, 9)}, 7)
    profile = Profile(trials=[measured]).merge(Profile(trials=[learnt]))
    (found,) = profile.trials
    assert (found.calls, found.timings["a"].ratio, found.timings["a"].error) == (7, 0.5, 0.25)
    assert found.timings["b"] == measured.timings["b"]
    (again,) = profile.merge(Profile(trials=[learnt])).trials
    assert again == found  # the same calls do not count twice
    (anew,) = profile.merge(Profile(trials=[measured])).trials
    assert anew.calls == 0
    assert b"calls" not in msgspec.json.encode(Profile(trials=[measured]))


def test_what_was_learnt_alone_does_not_count_as_a_calibration():
    problem = Problem(op="qr", m=100, n=10)
    trial = Trial(problem, {"stock": Timing(1e-3), "cpu": Timing(8e-4, 0.8, 0.02, 4)}, 3)
    assert not CostModel(Profile(trials=[trial])).knows(problem)


def test_comparisons_in_enough_calls_settle_what_is_compared(made):
    problem = Problem(op="learnt", m=4, n=4)
    timings = {"stock": Timing(1e-3), "fast": Timing(1e-3, 0.99, 0.02, 12), "slow": Timing(3e-3, 3.0, 0.02, 2)}
    known = uncertain(made.op)
    for calls, left in ((1, {"fast"}), (contenders.ENOUGH, set())):
        model = CostModel(known.merge(Profile(trials=[Trial(problem, timings, calls)])))
        found = policy.decide(Feasibility(made.op, problem), model, Settings())
        assert (found.candidate, found.source, set(found.contenders)) == ("stock", "learnt", left)


@pytest.mark.parametrize(("seconds", "winner"), [(0.94e-3, ""), (0.85e-3, "slow")])
def test_more_threads_must_gain_more(made, seconds, winner):
    case = learning.Case(
        policy.Decision(
            problem=Problem(op="learnt"), candidate="fast", reason="", source="measured", contenders=("slow",)
        )
    )
    made.op.listed[1] = msgspec.structs.replace(made.op.listed[1], threads=1)
    case.rounds = [{"fast": 1e-3, "slow": seconds, "stock": 2e-3}] * 12
    assert case.verdict(made.op) == winner


def test_five_equal_rounds_are_needed(made):
    case = learning.Case(
        policy.Decision(
            problem=Problem(op="learnt"), candidate="stock", reason="", source="measured", contenders=("fast",)
        )
    )
    case.rounds = [{"stock": 1e-3, "fast": 5e-4}] * 4
    assert case.verdict(made.op) == ""
    assert case.open
    case.rounds *= 2
    assert case.verdict(made.op) == "fast"


def test_gradients_that_an_op_writes_itself_stay_the_callers():
    leaf = A.clone().requires_grad_()
    leaf.grad = held = torch.full_like(A, 7.0)
    with beside.unseen(Settings(), (None, {"a": leaf})):
        assert leaf.grad is None
        (leaf * 2).sum().backward()
    assert leaf.grad is held
    assert held.eq(7).all()


@pytest.mark.slow
def test_a_process_keeps_at_its_end_what_it_learnt_and_the_next_one_begins_with_it(tmp_path):
    program = textwrap.dedent("""
        import sys, time, torch
        from autokern.core.problem import Features, Problem
        from autokern.core.op import Op
        from autokern.runtime import dispatch, learning
        from autokern.system import host
        from autokern.tuning import store
        from autokern.tuning.profile import Profile, Timing, Trial

        class Double(Op):
            name, summary, contract = "double", "twice a matrix", "exact"
            def key(self, a): return a.shape
            def problem_of(self, a): return Problem(op="double", m=a.shape[0], n=a.shape[1])
            def reference(self, a): return 2 * a
            def sample(self, problem, generator): return (torch.ones(problem.m, problem.n),)
            def check(self, problem, out, args): return 0.0
            def grid(self, level, dtype, device): return []
            def features(self, problem): return Features(flops=float(problem.m))
            def memory(self, problem): return 8
        op = Double()
        op.candidate("stock")(lambda a: (time.sleep(2e-3), 2 * a)[1])
        op.candidate("fast")(lambda a: 2 * a)
        here, session = host.current(), dispatch.session()
        timings = {"stock": Timing(2e-3), "fast": Timing(2e-3, 1.0, 0.5, 1)}
        trials = [Trial(Problem(op="double", m=n, n=n), timings) for n in (2, 4, 8)]
        if sys.argv[1] == "first":
            store.save(session.settings, Profile(host=here.fields, fingerprint=here.fingerprint, trials=trials))
        session.learning._began -= 1000  # as if much else had taken place
        call, a = dispatch.route(op), torch.ones(4, 4, dtype=torch.float64)
        for _ in range(2000 if sys.argv[1] == "first" else 1):
            call(a)
            if dispatch.decisions()[0][0].source == "learnt":
                break
        print(dispatch.decisions()[0][0].candidate, dispatch.decisions()[0][0].reason)
    """)
    path = tmp_path / "program.py"
    path.write_text(program)
    environment = {**os.environ, "AUTOKERN_HOME": str(tmp_path / "home"), "AUTOKERN_LEARN": "on"}

    def run(which):
        told = subprocess.run(
            [sys.executable, path, which], env=environment, capture_output=True, text=True, check=True
        )
        assert not told.stderr
        return told.stdout

    assert run("first").startswith("fast learnt from ")
    second = run("second")
    assert second.startswith("fast predicted to be the fastest")
    assert "learnt from" in second
