"""op.py: the rules of the registry, and what a trial gives."""

from __future__ import annotations

import pytest
import torch
from support.programs import said

from autokern import op as public_op
from autokern.core.errors import AutokernError, SettingsError
from autokern.core.op import ACCURACIES, tensors_in
from autokern.core.problem import Problem
from autokern.core.registry import get, known, registered
from autokern.tuning.measuring import trial


@pytest.fixture
def double(make_op):
    made = make_op("double")

    @made.candidate("stock")
    def stock(a):
        """a + a.

        More about it.
        """
        return a + a

    @made.candidate("times", accuracy="better", unsupported=lambda p: "too small" if p.n < 2 else None)
    def times(a):
        return 2 * a

    return made


def test_an_op_and_a_candidate_are_registered_once_and_stock_first(double, make_op):
    for of, name in ((double, "times"), (made := make_op("first"), "fast")):
        with pytest.raises(AutokernError, match=rf"{of.name}\.{name}"):
            of.candidate(name)
    made.candidate("stock")(lambda a: a)
    with pytest.raises(AutokernError, match=r"first\.stock: registered twice"):
        made.candidate("stock")
    with pytest.raises(AutokernError, match="'double' is registered twice"):
        make_op("double")


def test_what_is_unknown_is_refused_and_what_there_is_told(double):
    assert not known("nonsense")
    with pytest.raises(SettingsError, match=r"unknown op 'nonsense'; autokern knows .*qr"):
        get("nonsense")
    with pytest.raises(SettingsError, match="op double has no candidate 'x'; it has stock, times"):
        double["x"]
    with pytest.raises(AutokernError, match="'exact' is none of same, better, approximate"):
        double.candidate("exact", accuracy="exact")


def test_candidates_take_over_what_the_op_says(double):
    assert get("double") is double
    assert [o.name for o in registered()] == sorted(o.name for o in registered())
    assert double.names() == ["stock", "times"]
    assert double.stock is double["stock"]
    assert (double.stock.summary, double["times"].summary) == ("a + a.", "")
    assert (double.stock.accuracy, double["times"].accuracy) == ("same", "better")
    assert double["times"].memory == double.memory
    assert double.stock.run(1) == 2


def test_what_a_problem_rules_out_and_what_the_machine_lacks(double):
    double.candidate("gpu", unavailable=lambda device: f"no {device} here" if device == "cuda" else None)(lambda a: a)
    problem = Problem(op="double", m=1, n=1)
    assert [double[name].why_not(problem) for name in double.names()] == [None, "too small", None]
    assert [c.name for c in double.feasible(problem)] == ["stock", "gpu"]
    assert double["gpu"].why_not(problem.replace(device="cuda")) == "no cuda here"
    assert double["gpu"].unsupported(problem.replace(device="cuda")) is None


def test_tensors_in_nested_arguments():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    layer = torch.nn.Linear(2, 2)
    assert list(tensors_in((a, [b, (c, None, "text", 3)], torch.Size([2])))) == [a, b, c]
    assert list(tensors_in((layer, a))) == [*layer.parameters(), a]
    assert list(tensors_in("text")) == []


# --- trials -----------------------------------------------------------------------------------------------------------


def test_a_trial_with_gradients_has_one_cotangent_for_all_candidates_and_calls(double):
    problem = Problem(op="double", m=3, n=2, grad="a")
    a = torch.randn(3, 2, requires_grad=True)
    calls = [trial(double, c.run, problem, (a,)) for c in double.candidates]
    found = [call().grads[0] for call in calls for _ in range(2)]
    assert trial(double, double["times"].run, problem.replace(grad=""), (a,))().grads == ()
    assert all(g.equal(found[0]) for g in found)
    assert found[0].shape == a.shape
    assert found[0].unique().numel() == a.numel()


def test_a_trial_takes_gradients_of_the_canonical_form(make_op):
    made = make_op("signless", canonical=lambda out: out.abs())
    made.candidate("stock")(lambda a: 2 * a)
    a = torch.randn(3, 2, requires_grad=True)
    problem = Problem(op="signless", m=3, n=2, grad="a")
    one = trial(made, lambda a: 2 * a, problem, (a,))().grads[0]
    other = trial(made, lambda a: -2 * a, problem, (a,))().grads[0]
    assert one.equal(other)


def test_a_trial_differentiates_parameters_of_modules(double):
    layer = torch.nn.Linear(2, 1)
    problem = Problem(op="double", m=3, n=2, grad="theta")
    _, grads = trial(double, lambda net, x: net(x), problem, (layer, torch.ones(3, 2)))()
    assert [g.shape for g in grads] == [p.shape for p in layer.parameters()]


# --- the registry as it is --------------------------------------------------------------------------------------------


def test_every_op_is_complete():
    assert public_op("qr") is get("qr")
    for made in registered():
        assert made.stock.name == "stock"
        assert made.stock.accuracy == "same"
        assert made.summary
        for candidate in made.candidates:
            assert candidate.accuracy in ACCURACIES
            assert candidate.summary.endswith("."), f"{made.name}.{candidate.name} needs a docstring"
            assert candidate.name == candidate.name.lower()


@pytest.mark.slow
def test_ops_that_are_imported_after_enable_hold_the_libraries_own_functions():
    program = """
import sys, warnings
warnings.simplefilter("ignore")
import autokern.auto
from autokern.core.registry import registered
from autokern.hooks import install
before = [name for name in sys.modules if name.startswith("autokern.ops.") and "predict" in name]
registered()
replacements = {id(patch.replacement) for patch in install.patches()}
ours = {name: vars(module) for name, module in sys.modules.items() if name.startswith("autokern.")}
held = [
    (name, key)
    for name, space in ours.items()
    for key, value in space.items()
    if id(value) in replacements and not name.startswith("autokern.hooks.")
]
print(before, held)
"""
    assert said(program) == ["[]", "[]"]
