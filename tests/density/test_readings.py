"""A model read once computes what the libraries compute, and is read again, or left alone, when it changes."""

import gpytorch
import numpy as np
import pytest
import torch
from botorch.models import SingleTaskGP
from botorch.models.kernels.positive_index import PositiveIndexKernel
from botorch.models.transforms import input as transforms
from botorch.models.transforms.input import ChainedInputTransform, Log10, Normalize, Round, Warp
from gpytorch import kernels as k
from gpytorch import priors as p
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean, ConstantMeanGrad
from gpytorch.mlls import ExactMarginalLogLikelihood
from support.array_kernels import tasks
from support.models import loss_of
from support.readings import D, Model, agree, made, read
from torch.distributions import Gamma

from autokern.density.exact_objective import Reading

NORMAL, LKJ = p.NormalPrior(0.0, 1.0), p.LKJCovariancePrior(3, 1.0, p.SmoothedBoxPrior(0.1, 2.0))
pytestmark = pytest.mark.filterwarnings("ignore:Data")


RBF = k.RBFKernel().double()


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def transformed(transform, outputs=1):
    generator = torch.Generator().manual_seed(1)
    x = 0.5 + 3 * torch.rand(14, D, generator=generator, dtype=torch.float64)
    y = torch.stack([(x * (at + 1)).sum(-1).sin() for at in range(outputs)], -1)
    model = SingleTaskGP(x, y, input_transform=transform)
    return ExactMarginalLogLikelihood(model.likelihood, model).train()


TRANSFORMS = {
    "learned bounds": lambda: Normalize(D),
    "bounds": lambda: Normalize(D, bounds=torch.stack([torch.zeros(D), 3 * torch.ones(D)]).double()),
    "some bounds": lambda: Normalize(D, indices=[2, 0]),
    "in evaluation only": lambda: Normalize(D, transform_on_train=False),
    "standardised": lambda: transforms.InputStandardize(D),
    "affine": lambda: transforms.AffineInputTransform(D, numbers(1, 2, 3, 4), numbers(0.1, 0.2, 0.3, 0.4)),
    "reversed": lambda: transforms.AffineInputTransform(D, numbers(1, 2, 3, 4), numbers(1, 2, 3, 4), reverse=True),
    "logarithms": lambda: Log10(indices=[1]),
    "rounded": lambda: Round(integer_indices=[0]),
    "nearly rounded": lambda: Round(integer_indices=[0], approximate=True),
    "rounded categories": lambda: Round(categorical_features={1: 2}),
    "filtered": lambda: transforms.FilterFeatures(torch.tensor([2, 0])),
    "a chain": lambda: ChainedInputTransform(a=Log10(indices=[1]), b=Normalize(D), c=Round(integer_indices=[2])),
}


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_input_transforms_are_run_once_and_left_as_the_library_leaves_them(transform, outputs):
    mll, other = transformed(transform(), outputs), transformed(transform(), outputs)
    before = torch.random.get_rng_state()
    reading = Reading(mll)
    assert reading.holds()
    loss_of(other)
    for (name, one), two in zip(mll.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, msg=name)
    assert torch.equal(torch.random.get_rng_state(), before)
    agree(mll, reading)


def test_ways_to_register_a_prior():
    mll = made(k.ScaleKernel(k.RBFKernel()) + k.RQKernel() + k.PolynomialKernel(2))
    kernels = mll.model.covar_module.kernels
    kernels[0].register_prior("one", NORMAL, "outputscale")
    kernels[0].base_kernel.register_prior("two", NORMAL, lambda m: m.lengthscale)
    kernels[1].register_prior("three", NORMAL, "alpha")
    kernels[2].register_prior("four", NORMAL, lambda module: module.offset)
    mll.likelihood.register_prior("five", NORMAL, "noise")
    mll.double()
    reading = agree(mll)
    kernels[2]._priors["four"] = (kernels[2]._priors["four"][0], lambda m: m.offset**2, None)
    assert not reading.holds()
    assert read(mll) is None


@pytest.mark.parametrize("prior", [p.UniformPrior(2.0, 3.0), p.HalfNormalPrior(1.0)])
def test_values_that_a_prior_excludes_are_the_librarys_matter(prior):
    mll = made(mean=ConstantMean(constant_prior=prior))
    with torch.no_grad():
        mll.model.mean_module.raw_constant.fill_(-1.0)
    assert Reading(mll).evaluate(dict(mll.named_parameters())) is None


class Doubled(Model):
    def forward(self, x):
        mean_x = self.mean_module(x)
        covar_x = self.covar_module(x)
        return gpytorch.distributions.MultivariateNormal(mean_x, covar_x + covar_x)


class Shifted(Model):
    def forward(self, x):
        mean_x = self.mean_module(x)
        covar_x = self.covar_module(x)
        return gpytorch.distributions.MultivariateNormal(covar_x, mean_x)


def own(kind=Model, **members):
    """A class of the user's that has these members anew."""
    return type("Own", (kind,), members)


def changed(mll, change):
    change(mll.model)
    return mll


def free(*values):
    return torch.nn.Parameter(numbers(*values))


class Unbounded(Interval):
    """A constraint whose bounds are the optimiser's, with a function that its class has."""

    def transform(self, tensor):
        return self._transform(tensor)

    def inverse_transform(self, tensor):
        return tensor.log()

    _transform = property(lambda self: torch.exp, lambda self, value: None)


def with_prior(closure):
    kernel = k.RBFKernel()
    kernel.kind = kernel.lengthscale
    kernel.register_prior("own", NORMAL, closure)
    return made(kernel)


def twice(kernel):
    kernel.kernels[1].raw_variance = kernel.kernels[0].raw_variance
    return made(kernel)


UNREAD = {
    "another forward": lambda: made(kind=Doubled),
    "modules in each other's place": lambda: made(kind=Shifted),
    "a call of its own": lambda: made(kind=own(__call__=lambda *args: None)),
    "a property": lambda: made(
        kind=own(covar_module=property(lambda m: RBF, lambda m, kernel: m._modules.update(covar_module=kernel)))
    ),
    "other targets": lambda: made(
        kind=own(train_targets=property(lambda m: 2 * m._targets, lambda m, value: setattr(m, "_targets", value)))
    ),
    "added losses": lambda: made(kind=own(added_loss_terms=lambda self: iter(()))),
    "another likelihood": lambda: ExactMarginalLogLikelihood(GaussianLikelihood().double(), made().model),
    "a forward of an instance": lambda: changed(
        made(), lambda m: setattr(m.covar_module, "forward", m.covar_module.forward)
    ),
    "a parameter of the model": lambda: changed(made(), lambda m: setattr(m, "extra", free(0.0, 0.0))),
    "points that want a gradient": lambda: changed(
        made(), lambda m: m.set_train_data(m.train_inputs[0].clone().requires_grad_(), strict=False)
    ),
    "a constant for each point": lambda: changed(
        made(), lambda m: setattr(m.mean_module, "raw_constant", free(*[0.0] * 13))
    ),
    "noise that wants a gradient": lambda: made(
        likelihood=FixedNoiseGaussianLikelihood(numbers(*[0.1] * 13).requires_grad_())
    ),
    "another mean": lambda: made(mean=ConstantMeanGrad()),
    "a subclass of a kernel": lambda: made(own(k.RBFKernel)()),
    "another kernel": lambda: made(k.PiecewisePolynomialKernel(0, ard_num_dims=D)),
    "dimensions from the end": lambda: made(k.RBFKernel(active_dims=[-1])),
    "a batch of kernels": lambda: made(k.LinearKernel(batch_shape=torch.Size([2]))),
    "a power of NumPy's": lambda: made(k.PolynomialKernel(np.float64(2))),
    "tasks of several columns": lambda: made(k.IndexKernel(3)),
    "a kernel that serves twice": lambda: made(k.AdditiveKernel(shared := k.RBFKernel(), k.ScaleKernel(shared))),
    "a parameter that serves twice": lambda: twice(k.LinearKernel() + k.LinearKernel()),
    "a constraint's own function": lambda: made(
        k.RBFKernel(lengthscale_constraint=Unbounded(0.1, 9.0, transform=None))
    ),
    "another prior": lambda: made(k.RBFKernel(lengthscale_prior=p.HalfCauchyPrior(1.0))),
    "a prior of tasks": lambda: made(k.IndexKernel(3, prior=LKJ, active_dims=[2])),
    "a prior of a logarithm": lambda: with_prior(lambda m: m.lengthscale.log()),
    "a prior of a raw parameter": lambda: with_prior(lambda m: m.raw_lengthscale),
    "a prior of something with an option": lambda: with_prior(lambda m, at=1: m.lengthscale),
    "a prior of another attribute": lambda: with_prior(lambda m: m.kind),
    "a transform with parameters": lambda: transformed(Warp(D, indices=[0, 1, 2])),
    "more points": lambda: transformed(transforms.AppendFeatures(torch.ones(2, 1).double(), transform_on_train=True)),
    "a subclass of a transform": lambda: transformed(own(Normalize)(D)),
    "a part that is not known": lambda: transformed(ChainedInputTransform(a=Normalize(D), b=Warp(D, indices=[0]))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", UNREAD.values(), ids=UNREAD)
def test_what_is_not_exactly_known_is_not_read(make):
    assert read(make()) is None


def by_parts():
    parts = (k.MaternKernel(0.5, active_dims=[0]), k.PolynomialKernel(2), PositiveIndexKernel(3, 2, active_dims=[3]))
    return tasks(made(k.AdditiveKernel(*parts)), (2, 2), (3, 3))


def by_transforms():
    mll = transformed(ChainedInputTransform(a=Log10(indices=[1]), b=Normalize(D), d=Round()))
    Reading(mll)
    loss_of(mll)  # which learns the same bounds again, in new tensors
    return mll


CHANGES = {
    made: {
        "other points in place": lambda m: m.train_inputs[0].data.mul_(1.1),
        "evaluation mode": lambda m: m.eval(),
        "active dimensions": lambda m: setattr(m.covar_module, "active_dims", torch.tensor([0, 1])),
        "a module": lambda m: setattr(m, "more", k.RBFKernel()),
        "a hook after a gradient": lambda m: m.covar_module.raw_lengthscale.register_post_accumulate_grad_hook(print),
        "a forward of the model": lambda m: setattr(m, "forward", lambda x: None),
        "a transform": lambda m: setattr(m.covar_module.raw_lengthscale_constraint, "transform", torch.exp),
        "distances": lambda m: setattr(m.covar_module, "covar_dist", None),
        "another class": lambda m: setattr(m.covar_module, "__class__", own(k.RBFKernel)),
        "points that want gradients": lambda m: m.train_inputs[0].requires_grad_(),
        "an attribute in front": lambda m: m.__dict__.update(covar_module=k.RBFKernel()),
        "a likelihood's call": lambda m: setattr(m.likelihood, "marginal", lambda *args: None),
    },
    by_parts: {
        "a power": lambda m: setattr(m.covar_module.kernels[1], "power", 3),
        "a unit": lambda m: setattr(m.covar_module.kernels[2], "unit_scale_for_target", False),
        "a target": lambda m: setattr(m.covar_module.kernels[2], "target_task_index", 1),
        "a factor": lambda m: setattr(
            m.covar_module.kernels[2], "raw_covar_factor", torch.nn.Parameter(torch.ones(3, 2).double())
        ),
        "smoothness": lambda m: setattr(m.covar_module.kernels[0], "nu", 1.5),
        "columns": lambda m: m.covar_module.kernels[2].active_dims.copy_(torch.tensor([2])),
    },
    by_transforms: {
        "a buffer in place": lambda m: m.input_transform["b"]._offset.add_(0.1),
        "a buffer": lambda m: setattr(m.input_transform["b"], "_offset", torch.zeros(1, D, dtype=torch.float64)),
        "a setting": lambda m: setattr(m.input_transform["b"], "learn_coefficients", False),
        "a mode": lambda m: m.input_transform["b"].eval(),
        "on training": lambda m: setattr(m.input_transform["a"], "transform_on_train", False),
        "the chain": lambda m: m.input_transform.update({"c": Normalize(D)}),
        "a part": lambda m: m.input_transform.update({"b": Normalize(D)}),
        "a dictionary": lambda m: m.input_transform["d"].categorical_features.update({1: 2}),
        "all of it": lambda m: setattr(m, "input_transform", Normalize(D)),
        "none": lambda m: delattr(m, "input_transform"),
        "a hook": lambda m: m.input_transform["a"].register_forward_hook(lambda *a: None),
        "points": lambda m: m.train_inputs[0].add_(1),
        "a forward": lambda m: setattr(m.input_transform["a"], "forward", lambda X: X),
    },
}


@pytest.mark.parametrize(
    ("make", "change"),
    [pytest.param(make, change, id=name) for make, some in CHANGES.items() for name, change in some.items()],
)
def test_a_model_that_changes_is_seen_and_read_anew_or_left_alone(make, change):
    mll = make()
    reading = Reading(mll)
    assert reading.holds()
    change(mll.model)
    assert not reading.holds()
    if (again := read(mll)) is not None:
        agree(mll, again, digits=1e3)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((Model, name) for name in ("__call__", "transform_inputs")),
        *((k.RBFKernel, name) for name in ("__call__", "forward")),
        *((ConstantMean, "forward"), (GreaterThan, "transform"), (Gamma, "log_prob")),
    ],
)
def test_functions_of_classes_that_are_patched_or_come_later_are_seen(kind, name, monkeypatch):
    mll = made(k.RBFKernel(lengthscale_prior=p.GammaPrior(3.0, 6.0)))
    reading = Reading(mll)
    assert reading.holds()
    monkeypatch.setattr(kind, name, lambda *args, **kwargs: None, raising=False)
    assert not reading.holds()


def test_a_patched_transform_is_not_called_to_be_read(monkeypatch):
    """BoTorch keeps what a call makes of its coefficient, so that one call more is another model."""
    mll, calls = transformed(Normalize(D)), []
    monkeypatch.setattr(transforms.AffineInputTransform, "coefficient", property(calls.append))
    assert read(mll) is None
    assert not calls
