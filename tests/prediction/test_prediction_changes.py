"""What is kept serves only the values that it was made of, and what is read late is that of the call that made it."""

from __future__ import annotations

import threading

import gpytorch
import pytest
import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.means import ZeroMean
from support.exact_models import (
    MODELS,
    Regression,
    Several,
    assert_close,
    change,
    fantasy,
    moments,
    ours,
    points,
    refitted,
    regression,
    several_at,
    stock_s,
    values,
)
from support.threads import in_threads

import autokern
from autokern.core.registry import get
from autokern.prediction.inverse_factor import Conditioned

pytestmark = pytest.mark.usefixtures("one_thread")
CANDIDATES = get("predict").names()
each_candidate = pytest.mark.parametrize("candidate", CANDIDATES)
each_way = pytest.mark.parametrize("fast", [False, True], ids=["solve", "fast"])


def stepped(optimizer):
    def step(model):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer(model.parameters()).step()

    return step


def trained(model):
    optimiser = torch.optim.Adam(model.parameters(), lr=0.3)
    with torch.enable_grad():
        model(points(3, seed=9)).mean.sum().backward()
    optimiser.step()


def loaded(model):
    state = {name: value.clone() + 0.5 for name, value in model.state_dict().items()}
    bounds = {name: value for name, value in model.state_dict().items() if "bound" in name}
    model.load_state_dict({**state, **bounds})


def bounded(model):
    model.covar_module.base_kernel.raw_lengthscale_constraint.lower_bound.fill_(0.5)


def attached(model):
    base = model.covar_module.base_kernel
    base.raw_lengthscale = None
    del base._parameters["raw_lengthscale"]
    base.raw_lengthscale = torch.full((1, 3), 0.7, dtype=torch.float64)


def others(model):
    x = points(len(model.train_targets), seed=4)
    model.set_train_data(x, values(x))


NOISE = {
    "noise setter": lambda m: setattr(m.likelihood, "noise", 0.9),
    "data of the noise": lambda m: m.likelihood.raw_noise.data.fill_(2.0),
}
CHANGES = {
    "outputscale setter": lambda m: setattr(m.covar_module, "outputscale", 3.0),
    "lengthscale setter": lambda m: setattr(m.covar_module.base_kernel, "lengthscale", 0.2),
    "initialize": lambda m: m.initialize(**{"covar_module.base_kernel.lengthscale": 0.3, "likelihood.noise": 0.4}),
    "data": lambda m: m.covar_module.raw_outputscale.data.fill_(2.0),
    "another tensor as data": lambda m: setattr(
        m.covar_module.raw_outputscale, "data", torch.tensor(2.0, dtype=torch.float64)
    ),
    "in place": change,
    "load_state_dict": loaded,
    "a step of training": trained,
    "Adam": stepped(lambda p: torch.optim.Adam(p, lr=0.3)),
    "Adam, fused": stepped(lambda p: torch.optim.Adam(p, lr=0.3, fused=True)),
    "AdamW, fused": stepped(lambda p: torch.optim.AdamW(p, lr=0.3, fused=True)),
    "SGD, fused": stepped(lambda p: torch.optim.SGD(p, lr=0.3, fused=True)),
    "buffer": bounded,
    "attribute": attached,
    "inputs in place": lambda m: m.train_inputs[0].mul_(1.3),
    "targets in place": lambda m: m.train_targets.mul_(1.3),
    "inputs through NumPy": lambda m: m.train_inputs[0].numpy().__imul__(1.3),
    "set_train_data": others,
    "points": lambda m: m.set_train_data(points(9), values(points(9)), strict=False),
    "targets": lambda m: m.set_train_data(targets=m.train_targets + 1, strict=False),
    "data of the inputs": lambda m: m.train_inputs[0].data.mul_(0.9),
    "data of the mean": lambda m: m.mean_module.raw_constant.data.add_(1.0),
    "mean module": lambda m: setattr(m, "mean_module", ZeroMean().double()),
    "kernel": lambda m: setattr(m, "covar_module", ScaleKernel(MaternKernel(1.5)).double()),
    "unknown kernel": lambda m: setattr(m, "covar_module", ScaleKernel(LinearKernel()).double()),
    "active dimensions": lambda m: setattr(m.covar_module, "active_dims", torch.tensor([2, 1, 0])),
    "constraint": lambda m: setattr(
        m.covar_module.base_kernel, "raw_lengthscale_constraint", gpytorch.constraints.Interval(0.3, 4.0)
    ),
    "smoothness": lambda m: setattr(m.covar_module.base_kernel, "nu", 1.5),
    "training in between": lambda m: (m.train(), change(m)),
    "moved": lambda m: m.to(torch.float64),
    "forward of the kernel": lambda m: setattr(
        m.covar_module, "forward", lambda *a, f=m.covar_module.forward, **k: 2 * f(*a, **k)
    ),
}


@pytest.mark.thin("how candidate", "how fast", "how imagined", "how m", "candidate fast")
@pytest.mark.parametrize("candidate", [*CANDIDATES, "arrays"])
@each_way
@pytest.mark.parametrize("imagined", [False, True], ids=["model", "fantasy"])
@pytest.mark.parametrize("m", [20, 300])
@pytest.mark.parametrize("how", CHANGES | NOISE)
def test_predictions_after_any_change_are_those_of_a_fresh_model(how, candidate, fast, imagined, m):
    kernel = ScaleKernel(MaternKernel(2.5, ard_num_dims=3)) if how == "smoothness" else None
    model, x = regression(kernel=kernel), points(m, seed=5)
    with ours(candidate), settings.fast_pred_var(fast and how not in NOISE):
        moments(model(x))
        if imagined:
            model = fantasy(model, points(2, seed=6))
            moments(model(x))
        (CHANGES | NOISE)[how](model)
        model.eval()
        found, again = moments(model(x)), moments(model(x))
    expected = moments(refitted(model)(x))
    assert_close(found, expected)
    assert_close(again, expected)


def test_noise_written_through_data_is_not_seen_by_fast_variances():
    """As gpytorch's own tests want it: factor and covariances are of one time all the same."""
    with ours(), settings.fast_pred_var():
        model, x = regression(), points(7, seed=5)
        before = moments(model(x))
        model.likelihood.raw_noise.data.fill_(3.0)
        assert_close(moments(model(x)), before)
        with settings.fast_pred_var(False):
            assert_close(moments(model(x)), moments(refitted(model)(x)))


# --- what is read late ------------------------------------------------------------------------------------------------


class Twice(Regression):
    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x) + self.covar_module(x))


class Jittered(Regression):
    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x).add_jitter(1e-3))


LATE_MODELS = MODELS | {
    "sum of operators": lambda: regression(kind=Twice),
    "jitter in forward": lambda: regression(kind=Jittered),
    "independent": lambda: Several("independent"),  # of a Kronecker product stock forgets the old values itself
    "hadamard": lambda: Several("hadamard"),
}
LATE_CHANGES = [name for name in [*CHANGES][: [*CHANGES].index("points")] if "targets" not in name] + [*NOISE]
LATE = [(name, "in place", candidate) for name in LATE_MODELS for candidate in ("lazy", "lazy-product")]
LATE += [("ard", how, candidate) for how in LATE_CHANGES for candidate in CANDIDATES]


@pytest.mark.thin("make how", "candidate")
@pytest.mark.parametrize(("make", "how", "candidate"), LATE)
def test_what_is_read_late_is_of_the_values_at_the_call(make, how, candidate):
    def read(how):
        with torch.no_grad():
            model = LATE_MODELS[make]()
            x, *task = several_at(getattr(model, "kind", ""), 600)
            one, other = (model(x.to(model.train_targets), *task) for _ in range(2))
            how(model)
            return one.mean, one.variance, other.covariance_matrix

    expected = read(lambda model: None)
    with ours(candidate):
        assert_close(read((CHANGES | NOISE)[how]), expected)


@pytest.mark.thin("candidate", "how")
@each_candidate
@pytest.mark.parametrize("how", ["outputscale setter", "lengthscale setter", "data", "Adam, fused"])
def test_gradients_of_what_is_read_late_are_those_of_the_call(candidate, how):
    """Stock's are not: what it saves for the backward pass is written to."""
    x = points(300, seed=5)

    def gradients(how):
        model = regression()
        parameters = [*model.covar_module.parameters()]
        posterior = model(x)
        how(model)
        return torch.autograd.grad(posterior.variance.sum() + posterior.covariance_matrix.sum(), parameters)

    expected = gradients(lambda model: None)
    with ours(candidate):
        assert_close(gradients(CHANGES[how]), expected, rtol=1e-6, atol=1e-6)


# --- what users write -------------------------------------------------------------------------------------------------


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
@stock_s()
def test_a_kernel_of_the_users_gets_the_calls_that_stock_makes(candidate, m):
    torch.manual_seed(3)
    model = regression(kernel=ScaleKernel(Weighted()))
    found = []
    for by in (0.0, 0.1):
        with torch.no_grad():
            model.covar_module.base_kernel.net.bias.add_(by)
        posterior = model(points(m, seed=5))
        with torch.no_grad():
            model.covar_module.base_kernel.net.bias.add_(0.05)
        found += [posterior.variance.detach().clone(), model.covar_module.base_kernel.calls]
    return found


@pytest.mark.parametrize("m", [20, 700])
@stock_s()
def test_functions_of_the_users_in_kernels_of_the_library(m):
    strength, calls = [1.0], []

    def transform(value):
        calls.append(1)
        return torch.nn.functional.softplus(value) * strength[0]

    constraint = gpytorch.constraints.Positive(transform=transform)
    model = regression(kernel=ScaleKernel(RBFKernel(lengthscale_constraint=constraint)))
    first, posterior = model(points(m, seed=5)), model(points(m, seed=6))
    found = [first.mean, first.variance]
    strength[0] = 2.0
    return [*found, posterior.variance, model(points(m, seed=7)).variance, len(calls)]


def test_a_function_of_the_users_that_transforms_a_parameter_is_called_as_documented():
    def counted():
        calls, found = [], []

        def transform(x):
            calls.append(1)
            return torch.nn.functional.softplus(x)

        constraint = gpytorch.constraints.GreaterThan(
            1e-4, transform=transform, inv_transform=lambda y: y.expm1().log()
        )
        model = regression(30, kernel=RBFKernel(lengthscale_constraint=constraint))
        mll, (x,) = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model), model.train_inputs
        for run in (
            lambda: mll(model(x), model.train_targets).backward(),
            lambda: model(x[:5] + 1).variance,
            lambda: model(x + 1).mean,
        ):
            model.train(not found)
            before = len(calls)
            run()
            found.append(len(calls) - before)
        return found

    step, *predictions = counted()
    with ours():
        own, *more = counted()
    assert own == step
    assert all(0 <= one - other <= 2 for one, other in zip(more, predictions, strict=True)), (more, predictions)


def test_a_strategy_of_the_users_is_left_alone():
    class Own(gpytorch.models.exact_prediction_strategies.DefaultPredictionStrategy):
        pass

    with ours():
        model = regression()
        model(points(9, seed=4))
        old = model.prediction_strategy
        own = Own(old.train_inputs, old.train_prior_dist, old.train_labels, old.likelihood)
        model.prediction_strategy = own
        change(model)
        moments(model(points(9, seed=4)))
        assert model.prediction_strategy is own


@each_candidate
@pytest.mark.parametrize("m", [3, 300])
@pytest.mark.parametrize("name", ["exact_predictive_mean", "exact_predictive_covar"])
@stock_s()
def test_a_function_that_is_put_on_one_strategy(candidate, m, name):
    model = regression()
    model(points(2))
    strategy = model.prediction_strategy
    stock = getattr(strategy, name)
    setattr(strategy, name, lambda *args: 2.0 * stock(*args))
    return moments(model(points(m, seed=5)))


# --- odd sizes, dtypes and scales -------------------------------------------------------------------------------------


@pytest.mark.thin("whole", "part")
@pytest.mark.parametrize("whole", ["stock", "gemm", "tiled"])
@pytest.mark.parametrize("part", ["stock", "gemm", "broadcast"])
def test_points_far_from_the_origin_whichever_candidates_serve(whole, part):
    """Covariances between training points, and of those with others, must err alike, or not at all."""

    def errors(force):
        found = []
        for dtype in (torch.float64, torch.float32):
            x, new = points(150) + 5000, points(20, seed=5) + 5000
            model = Regression(x, values(x - 5000))
            model.likelihood.noise = 1e-2
            model.to(dtype)
            model.set_train_data(x.to(dtype), values(x - 5000).to(dtype), strict=False)
            with autokern.using(force=force if dtype is torch.float32 else None), torch.no_grad():
                if force is None:
                    found.append(model(new.to(dtype)))
                    continue
                with autokern.using(force={"kernel_matrix": whole}):
                    model(new[:1].to(dtype)).mean
                found.append(model(new.to(dtype)))
        true, single = ([posterior.mean, posterior.variance] for posterior in found)
        return [((s.double() - t).abs().max() / t.abs().max()).item() for t, s in zip(true, single, strict=True)]

    limits = errors(None)
    with ours():
        for error, limit in zip(errors({"kernel_matrix": part}), limits, strict=True):
            assert error < 2 * limit


def test_one_alpha_for_all_threads_that_ask_at_once():
    k = torch.eye(300, dtype=torch.float64) * 2
    for _ in range(20):
        known = Conditioned(torch.linalg.cholesky(k), residual=torch.ones(300, dtype=torch.float64))
        barrier, found = threading.Barrier(4), []

        def ask(_, known=known, barrier=barrier, found=found):
            barrier.wait()
            found.append(known.alpha)

        in_threads(ask, range(4))
        for alpha in found:
            assert_close(alpha, torch.full_like(alpha, 0.5))
