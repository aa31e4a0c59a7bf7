"""Input transforms are run once by the library's own code; their buffers are as stock leaves them, changes are seen."""

from __future__ import annotations

import pytest
import torch
from botorch.models import SingleTaskGP
from botorch.models.transforms.input import (
    AffineInputTransform,
    AppendFeatures,
    ChainedInputTransform,
    FilterFeatures,
    InputStandardize,
    Log10,
    Normalize,
    ReversibleInputTransform,
    Round,
    Warp,
)
from gpytorch.mlls import ExactMarginalLogLikelihood
from support.models import loss_of
from support.readings import agree

from autokern.density.exact_objective import Reading
from autokern.model.arrays import UnreadError

D = 3


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


class Own(Normalize):
    pass


class Doubling(ReversibleInputTransform):
    transform_on_train = transform_on_eval = transform_on_fantasize = True
    reverse = False

    def _transform(self, X):
        return 2 * X

    def _untransform(self, X):
        return X / 2


KNOWN = {
    "learned bounds": lambda: Normalize(D),
    "bounds": lambda: Normalize(D, bounds=torch.stack([torch.zeros(D), 3 * torch.ones(D)]).double()),
    "some bounds": lambda: Normalize(D, indices=[2, 0]),
    "in evaluation only": lambda: Normalize(D, transform_on_train=False),
    "standardised": lambda: InputStandardize(D),
    "affine": lambda: AffineInputTransform(D, numbers(1, 2, 3), numbers(0.1, 0.2, 0.3)),
    "reversed": lambda: AffineInputTransform(D, numbers(1, 2, 3), numbers(0.1, 0.2, 0.3), reverse=True),
    "logarithms": lambda: Log10(indices=[1]),
    "rounded": lambda: Round(integer_indices=[0]),
    "nearly rounded": lambda: Round(integer_indices=[0], approximate=True),
    "rounded categories": lambda: Round(categorical_features={1: 2}),
    "filtered": lambda: FilterFeatures(torch.tensor([2, 0])),
    "a chain": lambda: ChainedInputTransform(a=Log10(indices=[1]), b=Normalize(D), c=Round(integer_indices=[2])),
}
UNKNOWN = {
    "parameters": lambda: Warp(D, indices=[0, 1, 2]),
    "more points": lambda: AppendFeatures(torch.ones(2, 1).double(), transform_on_train=True),
    "a subclass": lambda: Own(D),
    "a class of one's own": Doubling,
    "a part that is not known": lambda: ChainedInputTransform(a=Normalize(D), b=Warp(D, indices=[0])),
}


def made(transform, outputs=1, **options):
    generator = torch.Generator().manual_seed(1)
    x = 0.5 + 3 * torch.rand(14, D, generator=generator, dtype=torch.float64)
    y = torch.stack([(x * (k + 1)).sum(-1).sin() for k in range(outputs)], -1)
    model = SingleTaskGP(x, y, input_transform=transform, **options)
    return ExactMarginalLogLikelihood(model.likelihood, model).train()


@pytest.mark.filterwarnings("ignore:Data")
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("transform", KNOWN.values(), ids=KNOWN.keys())
def test_known_transforms(transform, outputs):
    mll, other = made(transform(), outputs), made(transform(), outputs)
    before = torch.random.get_rng_state()
    reading = Reading(mll)
    assert reading.holds()
    loss_of(other)
    for (name, one), two in zip(mll.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, msg=name)
    assert torch.equal(torch.random.get_rng_state(), before)
    agree(mll, reading)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_unknown_transforms(transform):
    with pytest.raises(UnreadError):
        Reading(made(transform()))


def another(model):
    model.input_transform = Normalize(D)


CHANGES = {
    "a buffer in place": lambda m: m.input_transform["b"]._offset.add_(0.1),
    "a buffer": lambda m: setattr(m.input_transform["b"], "_offset", numbers(0.0, 0.0, 0.0).view(1, D)),
    "a setting": lambda m: setattr(m.input_transform["b"], "learn_coefficients", False),
    "a mode": lambda m: m.input_transform["b"].eval(),
    "on training": lambda m: setattr(m.input_transform["a"], "transform_on_train", False),
    "the chain": lambda m: m.input_transform.update({"c": Normalize(D)}),
    "a part": lambda m: m.input_transform.update({"b": Normalize(D)}),
    "a dictionary": lambda m: m.input_transform["d"].categorical_features.update({1: 2}),
    "all of it": another,
    "none": lambda m: delattr(m, "input_transform"),
    "a hook": lambda m: m.input_transform["a"].register_forward_hook(lambda *a: None),
    "points": lambda m: m.train_inputs[0].add_(1),
    "a forward": lambda m: setattr(m.input_transform["a"], "forward", lambda X: X),
}


@pytest.mark.filterwarnings("ignore:Data")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changes_are_seen(change):
    mll = made(ChainedInputTransform(a=Log10(indices=[1]), b=Normalize(D), d=Round()))
    reading = Reading(mll)
    loss_of(mll)  # which learns the same bounds again, in new tensors
    reading = Reading(mll)
    assert reading.holds()
    change(mll.model)
    assert not reading.holds()
    if not any(module._forward_hooks or "forward" in vars(module) for module in mll.modules()):
        try:
            made_again = Reading(mll)
        except UnreadError:
            assert any(not module.training for module in mll.modules())
        else:
            agree(mll, made_again)
