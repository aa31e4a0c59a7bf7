"""Modes and conversions of models: the same modules in the same state, whether anything had to be changed or not."""

import gpytorch
import pytest
import torch
from botorch.models.transforms import Normalize
from support.botorch_models import F64, KNOWN, D, single
from support.outcomes import as_stock, both


class Counted(gpytorch.kernels.RBFKernel):
    calls = 0

    def train(self, mode=True):
        self.calls += 1
        return super().train(mode)

    def _apply(self, fn):
        self.calls += 1
        return super()._apply(fn)


def made(kernel=None, known=False):
    return single(covar_module=kernel, train_Yvar=KNOWN if known else None, input_transform=Normalize(D))()


def tensors(model):
    return [*model.parameters(), *model.buffers(), *model.train_inputs, model.train_targets]


def state(model):
    every = [*tensors(model), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [m.training for m in model.modules()], [t.dtype for t in every], [t.requires_grad for t in every]


def with_a_flag_of_torch(model):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.to(torch.float64)  # has other parameters
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


CHANGES = {
    "eval": lambda m: m.eval(),
    "train": lambda m: m.train(),
    "a part": lambda m: (m.eval(), m.likelihood.train(), m.eval()),
    "a part of a part": lambda m: (m.eval(), m.covar_module.raw_lengthscale_constraint.train(), m.eval()),
    "single": lambda m: m.float(),
    "to single": lambda m: m.to(torch.float32),
    "to double": lambda m: m.to(torch.float64),
    "to a tensor": lambda m: m.to(torch.zeros(1, **F64)),
    "half there": lambda m: (m.covar_module.float(), m.to(torch.float64)),
    "data elsewhere": lambda m: (m.set_train_data(m.train_inputs[0].float(), strict=False), m.to(torch.float64)),
    "gradients": lambda m: (m(*m.train_inputs).mean.sum().backward(), m.to(torch.float64), m.to(torch.float32)),
    "noise": lambda m: (m.likelihood.noise_covar.float(), m.to(torch.float64)),
    "a flag": with_a_flag_of_torch,
}


@pytest.mark.parametrize("known", [False, True], ids=["noise", "known noise"])
@pytest.mark.parametrize("name", CHANGES)
@as_stock()
def test_state_is_the_same(name, known):
    model = made(known=known)
    before = tensors(model)
    returned = CHANGES[name](model)
    return returned is model, [one is other for one, other in zip(before, tensors(model), strict=True)], state(model)


def test_modules_of_the_user_are_asked():
    def calls():
        model = made(Counted())
        model.eval().eval().to(torch.float64).to(torch.float64)
        return model.covar_module.calls

    stock, ours = both(calls)
    assert stock == ours > 3
