"""What is kept serves only the values that it was made of, and what is read late is that of the call that made it."""

from __future__ import annotations

import copy
import threading
from unittest import mock

import gpytorch
import pytest
import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import LinearKernel, RBFKernel, RFFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean

import autokern
from autokern.core.registry import get
from autokern.gp.inverse_factor import Conditioned
from autokern.hooks import install

pytestmark = pytest.mark.usefixtures("one_thread", "stock_posteriors")
CANDIDATES = get("predict").names()
each_candidate = pytest.mark.parametrize("candidate", CANDIDATES)


class Regression(gpytorch.models.ExactGP):
    def __init__(self, n=40, kernel=None, likelihood=None):
        x = points(n)
        super().__init__(x, values(x), likelihood or GaussianLikelihood())
        self.mean_module = ConstantMean()
        self.covar_module = kernel or ScaleKernel(RBFKernel(ard_num_dims=3))
        self.double().eval()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Wrapped(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def points(n, seed=0):
    return torch.rand(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def values(x):
    return (4 * x[..., 0]).sin() + x[..., 1]


def moments(posterior):
    return [posterior.mean.detach().clone(), posterior.variance.detach().clone()]


def fresh(model):
    """Stock's predictions by a model of the same state that has predicted nothing."""
    other = copy.deepcopy(model)
    assert other.prediction_strategy is None
    return other


def close(found, expected, tolerance=1e-8):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def stepped(optimizer):
    def step(model):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer(model.parameters()).step()

    return step


def loaded(model):
    state = {name: value.clone() + 0.5 for name, value in model.state_dict().items()}
    bounds = {name: value for name, value in model.state_dict().items() if "bound" in name}
    model.load_state_dict({**state, **bounds})


def moved(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)


def bounded(model):
    model.covar_module.base_kernel.raw_lengthscale_constraint.lower_bound.fill_(0.5)


def attached(model):
    base = model.covar_module.base_kernel
    base.raw_lengthscale = None
    del base._parameters["raw_lengthscale"]
    base.raw_lengthscale = torch.full((1, 3), 0.7, dtype=torch.float64)


CHANGES = {
    "outputscale setter": lambda m: setattr(m.covar_module, "outputscale", 3.0),
    "lengthscale setter": lambda m: setattr(m.covar_module.base_kernel, "lengthscale", 0.2),
    "noise setter": lambda m: setattr(m.likelihood, "noise", 0.9),
    "initialize": lambda m: m.initialize(**{"covar_module.base_kernel.lengthscale": 0.3, "likelihood.noise": 0.4}),
    "data": lambda m: m.covar_module.raw_outputscale.data.fill_(2.0),
    "data of the noise": lambda m: m.likelihood.raw_noise.data.fill_(2.0),
    "another tensor as data": lambda m: setattr(
        m.covar_module.raw_outputscale, "data", torch.tensor(2.0, dtype=torch.float64)
    ),
    "in place": moved,
    "load_state_dict": loaded,
    "Adam": stepped(lambda p: torch.optim.Adam(p, lr=0.3)),
    "Adam, fused": stepped(lambda p: torch.optim.Adam(p, lr=0.3, fused=True)),
    "AdamW, fused": stepped(lambda p: torch.optim.AdamW(p, lr=0.3, fused=True)),
    "SGD, fused": stepped(lambda p: torch.optim.SGD(p, lr=0.3, fused=True)),
    "buffer": bounded,
    "attribute": attached,
    "inputs in place": lambda m: m.train_inputs[0].mul_(1.3),
    "targets in place": lambda m: m.train_targets.mul_(1.3),
    "inputs through NumPy": lambda m: m.train_inputs[0].numpy().__imul__(1.3),
    "set_train_data": lambda m: m.set_train_data(points(40, seed=4), values(points(40, seed=4))),
}


@each_candidate
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_predictions_after_any_change_are_those_of_a_fresh_model(change, candidate):
    model, x = Regression(), points(300, seed=5)
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        moments(model(x))
        change(model)
        found = moments(model(x))
        again = moments(model(x))
    expected = moments(fresh(model)(x))
    close(found, expected)
    close(again, expected)


NOISES = {
    "assigned": lambda noise: setattr(noise, "noise", torch.full((40,), 0.7, dtype=torch.float64)),
    "in place": lambda noise: noise.noise.mul_(5),
    "through data": lambda noise: noise.noise.data.mul_(5),
    "setter": lambda noise: noise.initialize(noise=torch.full((40,), 0.7, dtype=torch.float64)),
}


@each_candidate
@pytest.mark.parametrize("change", NOISES.values(), ids=NOISES)
def test_fixed_noise_that_changes(change, candidate):
    model, x = Regression(likelihood=FixedNoiseGaussianLikelihood(torch.full((40,), 0.1).double())), points(300, seed=5)
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        moments(model(x))
        change(model.likelihood.noise_covar)
        found = moments(model(x))
    close(found, moments(fresh(model)(x)))


@pytest.mark.thin("change fast", "candidate fast")
@each_candidate
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("change", [n for n in CHANGES if n not in {"noise setter", "data of the noise"}])
def test_fast_variances_never_mix_an_old_factor_with_new_covariances(change, fast, candidate):
    model, x = Regression(), points(20, seed=5)
    with autokern.enabled(), autokern.using(force={"predict": candidate}), settings.fast_pred_var(fast):
        moments(model(x))
        CHANGES[change](model)
        found = moments(model(x))
    close(found, moments(fresh(model)(x)))


@each_candidate
def test_a_first_prediction_under_autocast_leaves_nothing_to_the_next(candidate):
    model, x = Regression(), points(300, seed=5)
    expected = moments(fresh(model)(x))[1]
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            moments(model(x))
        close(moments(model(x))[1], expected)


@pytest.mark.thin("candidate", "m")
@pytest.mark.parametrize("m", [7, 300, 1100])
@each_candidate
def test_gradients_reach_the_parameters_that_were_swapped_in(candidate, m):
    x, kernel = points(m, seed=5), "model.covar_module."
    names = [kernel + "raw_outputscale", kernel + "base_kernel.raw_lengthscale"]

    def gradients():
        torch.manual_seed(0)
        wrapped = Wrapped(Regression())
        parameters = {name: (p.detach() * 1.1 + 0.1).requires_grad_() for name, p in wrapped.named_parameters()}
        posterior = torch.func.functional_call(wrapped, parameters, (x,))
        return torch.autograd.grad(posterior.variance.sum(), [parameters[name] for name in names])

    expected = gradients()
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        close(gradients(), expected, 1e-6)


@pytest.mark.thin("candidate", "change")
@each_candidate
@pytest.mark.parametrize("change", [n for n in CHANGES if "targets" not in n])
def test_what_is_read_late_is_that_of_the_call(candidate, change):
    x = points(300, seed=5)
    expected = Regression()(x)
    expected = [expected.variance, expected.covariance_matrix]
    for read in ("variance", "covariance_matrix"):
        model = Regression()
        with autokern.enabled(), autokern.using(force={"predict": candidate}), torch.no_grad():
            posterior = model(x)
            with torch.enable_grad():
                CHANGES[change](model)
            found = getattr(posterior, read)
        close(found, expected[read == "covariance_matrix"].detach())


@pytest.mark.thin("candidate", "change")
@each_candidate
@pytest.mark.parametrize("change", ["outputscale setter", "lengthscale setter", "data", "Adam, fused"])
def test_gradients_of_what_is_read_late_are_those_of_the_call(candidate, change):
    """Stock's are not: what it saves for the backward pass is written to."""
    x = points(300, seed=5)

    def gradients(model, change):
        parameters = [*model.covar_module.parameters()]
        posterior = model(x)
        change(model)
        return torch.autograd.grad(posterior.variance.sum() + posterior.covariance_matrix.sum(), parameters)

    expected = gradients(Regression(), lambda model: None)
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        close(gradients(Regression(), CHANGES[change]), expected, 1e-6)


@each_candidate
def test_gradients_through_caches_that_were_first_made_without(candidate):
    x = points(300, seed=5)

    def gradients(model):
        with settings.detach_test_caches(False):
            posterior = model(x)
            total = posterior.variance.sum() + posterior.mean.sum()
        return torch.autograd.grad(total, list(model.parameters()))

    expected = gradients(Regression())
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        model = Regression()
        with torch.no_grad():
            moments(model(x))
        close(gradients(model), expected, 1e-6)


@each_candidate
def test_what_is_read_late_under_autocast_or_in_inference_mode(candidate):
    x = points(300, seed=5)

    def read(model):
        posterior, other = model(x), model(x)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            found = posterior.lazy_covariance_matrix.to_dense(), other.variance
        return found, torch.autograd.grad(found[0].sum(), model.covar_module.raw_outputscale)

    expected = read(Regression())
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        found = read(Regression())
    close(found, expected, 1e-6)


class Weighted(gpytorch.kernels.Kernel):
    """A kernel of features that cannot be copied deeply once it has been called."""

    def __init__(self):
        super().__init__()
        self.base = RBFKernel()
        self.net = torch.nn.utils.weight_norm(torch.nn.Linear(3, 2))
        self.calls = 0

    def forward(self, x1, x2, diag=False, **params):
        self.calls += 1
        return self.base.forward(self.net(x1), self.net(x2), diag=diag, **params)


@pytest.mark.thin("candidate", "m")
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("m", [20, 1100])
@each_candidate
def test_a_kernel_of_the_users_gets_the_calls_that_stock_makes(candidate, m):
    def counted():
        torch.manual_seed(3)
        model = Regression(kernel=ScaleKernel(Weighted()))
        found, calls = [], []
        for change in (0.0, 0.1):
            with torch.no_grad():
                model.covar_module.base_kernel.net.bias.add_(change)
            posterior = model(points(m, seed=5))
            with torch.no_grad():
                model.covar_module.base_kernel.net.bias.add_(0.05)
            found.append(posterior.variance.detach().clone())
            calls.append(model.covar_module.base_kernel.calls)
        return found, calls

    expected, calls = counted()
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        found, made = counted()
    close(found, expected)
    assert made == calls


@pytest.mark.parametrize("m", [20, 700])
def test_a_kernel_that_draws_its_weights_when_it_is_first_called(m):
    def predicted():
        torch.manual_seed(0)
        model = Regression(kernel=ScaleKernel(RFFKernel(10) * RBFKernel()))
        found = moments(model(points(m, seed=5)))
        return [*found, *moments(model(points(m, seed=6))), torch.rand(1)]

    expected = predicted()
    with autokern.enabled():
        close(predicted(), expected)


@pytest.mark.parametrize("m", [20, 700])
def test_functions_of_the_users_in_kernels_of_the_library(m):
    def predicted():
        strength, calls = [1.0], []

        def transform(value):
            calls.append(1)
            return torch.nn.functional.softplus(value) * strength[0]

        constraint = gpytorch.constraints.Positive(transform=transform)
        model = Regression(kernel=ScaleKernel(RBFKernel(lengthscale_constraint=constraint)))
        found = moments(model(points(m, seed=5)))
        posterior = model(points(m, seed=6))
        strength[0] = 2.0
        return [*found, posterior.variance.detach(), *moments(model(points(m, seed=7)))[1:], torch.tensor(len(calls))]

    expected = predicted()
    with autokern.enabled():
        close(predicted(), expected)


class Counting(GaussianLikelihood):
    calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return super().__call__(*args, **kwargs)


def test_a_likelihood_of_the_users_gets_the_calls_that_stock_makes():
    def counted():
        model = Regression(likelihood=Counting())
        calls = []
        for seed in (5, 6):
            posterior = model.likelihood(model(points(20, seed=seed)))
            calls.append((model.likelihood.calls, posterior.variance.sum().item()))
        return calls

    expected = counted()
    with autokern.enabled():
        found = counted()
    assert [calls for calls, _ in found] == [calls for calls, _ in expected]
    assert [total for _, total in found] == pytest.approx([total for _, total in expected])


@pytest.mark.thin("whole", "part")
@pytest.mark.parametrize("whole", ["stock", "gemm", "tiled"])
@pytest.mark.parametrize("part", ["stock", "gemm", "broadcast"])
def test_points_far_from_the_origin_whichever_candidates_serve(whole, part):
    """Covariances between training points, and of those with others, must err alike, or not at all."""

    def errors(force):
        found = []
        for dtype in (torch.float64, torch.float32):
            x, new = points(150) + 5000, points(20, seed=5) + 5000
            model = Regression(1)
            model.set_train_data(x, values(x - 5000), strict=False)
            model.likelihood.noise = 1e-2
            model.to(dtype)
            with autokern.using(force=force if dtype is torch.float32 else None), torch.no_grad():
                if force is None:
                    found.append(model(new.to(dtype)))
                    continue
                with autokern.using(force={"kernel_matrix": whole}):
                    model(new[:1].to(dtype)).mean
                found.append(model(new.to(dtype)))
        truth, single = (moments(posterior) for posterior in found)
        return [((s.double() - t).abs().max() / t.abs().max()).item() for t, s in zip(truth, single, strict=True)]

    limits = errors(None)
    with autokern.enabled():
        for error, limit in zip(errors({"kernel_matrix": part}), limits, strict=True):
            assert error < 2 * limit


# --- fantasies --------------------------------------------------------------------------------------------------------


@pytest.mark.thin
@pytest.mark.parametrize("kernel", [None, "linear"])
@pytest.mark.parametrize("candidate", ["rows", "stock"])
@pytest.mark.parametrize("read", [True, False], ids=["read detached", "read attached"])
@pytest.mark.parametrize("made", [True, False], ids=["made detached", "made attached"])
def test_gradients_of_fantasies_are_those_of_the_setting_at_reading(made, read, candidate, kernel):
    new, ahead = points(2, seed=7).requires_grad_(), points(6, seed=8)

    def gradients():
        model = Regression(kernel=None if kernel is None else ScaleKernel(RBFKernel()) + LinearKernel())
        parameters = list(model.covar_module.parameters())
        with settings.detach_test_caches(made):
            model(ahead).mean
            imagined = model.get_fantasy_model(new, values(new))
        with settings.detach_test_caches(read):
            mean = imagined(ahead).mean
        if not mean.requires_grad:
            return [mean]
        found = torch.autograd.grad(mean.sum(), [new, *parameters], allow_unused=True)
        return [mean, *found]

    expected = gradients()
    with autokern.enabled(), autokern.using(force={"fantasy": candidate}):
        found = gradients()
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            close(one, other, 1e-6)


def test_a_fantasy_whose_parent_changes_before_it_is_first_read():
    with autokern.enabled(), torch.no_grad():
        model, x = Regression(), points(6, seed=8)
        moments(model(x))
        imagined = model.get_fantasy_model(points(2, seed=7), values(points(2, seed=7)))
        expected = moments(fresh(imagined)(x))
        moved(model)
        close(moments(imagined(x)), expected, 1e-6)


# --- small ones -------------------------------------------------------------------------------------------------------


@each_candidate
def test_empty_slices_of_a_posterior_covariance(candidate):
    model, x = Regression(), points(300, seed=5)
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        for _ in range(2):
            posterior = model(x)
            part = posterior.lazy_covariance_matrix[..., 0:0, 0:0]
            assert part.shape == (0, 0)
            assert part.diagonal(dim1=-2, dim2=-1).shape == (0,)
            assert part.to_dense().shape == (0, 0)


@each_candidate
def test_parameters_of_two_dtypes_give_the_dtype_of_stock(candidate):
    def dtypes():
        model = Regression()
        for part in (model, model.likelihood):
            part.float()
        model.train_inputs, model.train_targets = (model.train_inputs[0].float(),), model.train_targets.float()
        model.covar_module.raw_outputscale.data = model.covar_module.raw_outputscale.data.double()
        try:
            posterior = model(points(30, seed=5).float())
            return [posterior.mean.dtype, posterior.variance.dtype, posterior.covariance_matrix.dtype]
        except RuntimeError as error:
            return type(error)

    expected = dtypes()
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        assert dtypes() == expected


@pytest.mark.thin("candidate", "fast")
@each_candidate
@pytest.mark.parametrize("fast", [False, True])
def test_no_training_data_at_all(candidate, fast):
    def predicted():
        with settings.fast_pred_var(fast):
            return moments(Regression(0)(points(4, seed=5)))

    expected = predicted()
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        close(predicted(), expected)


@each_candidate
def test_a_forward_that_was_put_on_one_kernel(candidate):
    def predicted():
        model = Regression()
        base = model.covar_module.base_kernel
        base.forward = lambda x1, x2, **params: RBFKernel.forward(base, 0.5 * x1, 0.5 * x2, **params)
        return moments(model(points(300, seed=5)))

    expected = predicted()
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        close(predicted(), expected)


class Crooked(RBFKernel):
    """A kernel whose diagonal is another than that of its matrix."""

    def forward(self, x1, x2, diag=False, **params):
        found = super().forward(x1, x2, diag=diag, **params)
        return 7 * found if diag else found


@pytest.mark.parametrize("m", [20, 600])
def test_a_sum_of_covariances_has_the_diagonal_of_its_matrix(m):
    class Summed(Regression):
        def __init__(self):
            super().__init__()
            self.other = Crooked().double()

        def forward(self, x):
            return MultivariateNormal(self.mean_module(x), self.covar_module(x) + self.other(x))

    expected = moments(Summed()(points(m, seed=5)))
    with autokern.enabled():
        close(moments(Summed()(points(m, seed=5))), expected)


def test_one_alpha_for_all_threads_that_ask_at_once():
    k = torch.eye(300, dtype=torch.float64) * 2
    for _ in range(20):
        known = Conditioned(torch.linalg.cholesky(k), residual=torch.ones(300, dtype=torch.float64))
        barrier, found = threading.Barrier(4), []

        def ask(known=known, barrier=barrier, found=found):
            barrier.wait()
            found.append(known.alpha)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        for alpha in found:
            close(alpha, torch.full_like(alpha, 0.5))


def test_hooks_that_fail_to_go_in_leave_nothing_behind():
    before = gpytorch.models.ExactGP.get_fantasy_model
    with mock.patch.object(install, "_limit_threads", side_effect=RuntimeError("no")), pytest.raises(RuntimeError):
        autokern.enable()
    assert gpytorch.models.ExactGP.get_fantasy_model is before
    assert not install.is_enabled()
    autokern.disable()
    with autokern.enabled():
        assert install.is_enabled()


def test_a_function_of_the_users_that_transforms_a_parameter_is_called_as_documented():
    calls = []

    def transform(x):
        calls.append(1)
        return torch.nn.functional.softplus(x)

    constraint = gpytorch.constraints.GreaterThan(1e-4, transform=transform, inv_transform=lambda y: y.expm1().log())
    x = torch.rand(30, 2, generator=torch.Generator().manual_seed(0))

    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, x.sum(1), gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.RBFKernel(lengthscale_constraint=constraint)

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)

    def counted():
        found = []
        for run in (
            lambda: mll(model(x), x.sum(1)).backward(),
            lambda: model(x[:5] + 1).variance,
            lambda: model(x + 1).mean,
        ):
            model.train(not found)
            before = len(calls)
            run()
            found.append(len(calls) - before)
        return found

    step, *predictions = counted()
    with autokern.enabled():
        ours, *more = counted()
    assert ours == step
    assert all(0 <= one - other <= 2 for one, other in zip(more, predictions, strict=True)), (more, predictions)


@each_candidate
def test_a_forward_that_is_put_on_one_kernel_after_a_prediction(candidate):
    x = points(300, seed=5)

    def put(model):
        base = model.covar_module.base_kernel
        base.forward = lambda x1, x2, **params: RBFKernel.forward(base, 0.5 * x1, 0.5 * x2, **params)

    model = Regression()
    put(model)
    expected = moments(model(x))
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        model = Regression()
        model(x)
        put(model)
        close(moments(model(x)), expected)


@each_candidate
@pytest.mark.parametrize("m", [3, 300])
@pytest.mark.parametrize("name", ["exact_predictive_mean", "exact_predictive_covar"])
def test_a_function_that_is_put_on_one_strategy(candidate, m, name):
    x = points(m, seed=5)

    def predicted():
        model = Regression()
        model(points(2))
        strategy = model.prediction_strategy
        stock = getattr(strategy, name)
        setattr(strategy, name, lambda *args: 2.0 * stock(*args))
        return moments(model(x))

    expected = predicted()
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        close(predicted(), expected)
