"""`explain(model)` tells what serves the parts of a model, and why the library computes the others."""

import logging

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from support.losses import Own, single, sparse

import autokern
from autokern.core import errors


def rows(model):
    return {part: (by, why) for part, by, why in autokern.explain(model).rows}


def test_a_model_that_is_read_is_served_and_left_as_it_was():
    mll = single(ScaleKernel(RBFKernel()))
    before = [p.clone() for p in mll.parameters()]
    found = rows(mll.model)
    assert found["training step"] == ("objective by arrays", "")
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(mll.parameters(), before, strict=True))
    assert mll.model.prediction_strategy is None
    assert not autokern.is_enabled()


def test_a_kernel_of_your_own_is_named_with_the_kernels_that_are_read():
    why = rows(single().model)["training step"][1]
    assert "not read: a kernel Own (read are" in why
    assert "in long loops it is recorded and replayed" in why
    for part in ("prediction", "acquisition"):
        assert "a class or function of your own (Own)" in rows(single().model)[part][1]
    lines = str(autokern.explain(single().model)).splitlines()
    assert lines[0] == "Model: 12 points, float64, cpu"
    assert max(map(len, lines)) <= 80


def test_what_cannot_be_replayed_says_why():
    class Counting(Own):
        calls = 0

        def forward(self, *args, **kwargs):
            self.calls += 1
            return super().forward(*args, **kwargs)

    why = rows(single(ScaleKernel(Counting())).model)["training step"][1]
    assert "Counting.forward, a function of your own, may change what others see" in why


def test_lists_and_variational_models():
    models = [single(ScaleKernel(RBFKernel())).model, single().model]
    several = gpytorch.models.IndependentModelList(*models)
    assert {"1, training step", "2, training step", "2, prediction"} <= rows(several).keys()

    assert rows(sparse().model)["training step"] == ("the library", "in long loops it is recorded and replayed")


def test_other_modules_and_an_environment_that_switches_off(monkeypatch):
    with pytest.raises(autokern.SettingsError, match="a Linear was asked for; explain takes"):
        autokern.explain(torch.nn.Linear(2, 2))
    monkeypatch.setenv("AUTOKERN", "0")
    with pytest.raises(autokern.SettingsError, match="AUTOKERN=0"):
        autokern.explain(single().model)


def test_a_reason_is_said_once(monkeypatch):
    said, log = [], logging.getLogger("autokern")
    monkeypatch.setattr(log, "handle", lambda record: said.append(record.getMessage()))
    log.setLevel(logging.INFO)
    errors._said.clear()
    try:
        with autokern.enabled():
            for _ in range(3):
                mll = single()
                mll(mll.model(*mll.model.train_inputs), mll.model.train_targets)
    finally:
        log.setLevel(logging.NOTSET)
    named = [line for line in said if "a kernel Own" in line]
    assert named
    assert len(named) == len(set(named))
