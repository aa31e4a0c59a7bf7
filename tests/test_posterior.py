"""Predictions of exact models: what is read of them, gradients, caches, memory, and fantasies, against stock or truth."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import warnings
from unittest import mock

import gpytorch
import pytest
import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import (
    ConstantKernel,
    GridInterpolationKernel,
    IndexKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    MultitaskKernel,
    PeriodicKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, MultitaskMean

import autokern
from autokern import dispatch
from autokern.op import get
from autokern.posterior import PosteriorCovariance

pytestmark = pytest.mark.usefixtures("one_thread")
CANDIDATES = get("predict").names()
SMALL = [name for name in CANDIDATES if not name.startswith("rows")]
each_candidate = pytest.mark.parametrize("candidate", SMALL)
each_way = pytest.mark.parametrize("fast", [False, True], ids=["solve", "fast"])
BATCH = torch.Size([2])


class Regression(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel=None, likelihood=None, batch=torch.Size()):
        super().__init__(x, y, likelihood or GaussianLikelihood(batch_shape=batch))
        self.mean_module = ConstantMean(batch_shape=batch)
        self.covar_module = kernel or ScaleKernel(RBFKernel(ard_num_dims=x.shape[-1]))
        if likelihood is None:
            self.likelihood.noise = torch.full((*batch, 1), 0.05)
        self.to(x).eval()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def points(*shape, seed=0, dtype=torch.float64):
    return torch.rand(*shape, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def values(x):
    return (4 * x[..., 0]).sin() + x[..., 1]


def regression(n=40, kernel=None, likelihood=None, dtype=torch.float64):
    x = points(n, dtype=dtype)
    return Regression(x, values(x), kernel, likelihood)


def batched(n=25):
    x = points(2, n)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=3, batch_shape=BATCH), batch_shape=BATCH)
    kernel.outputscale = torch.tensor([0.5, 2.0])
    return Regression(x, values(x), kernel, batch=BATCH)


class Mine(Kernel):
    """A kernel as people write them, without a thought of diagonals."""

    has_lengthscale = True

    def forward(self, x1, x2, **params):
        return (-(x1.unsqueeze(-2) - x2.unsqueeze(-3)).div(self.lengthscale).square().sum(-1)).exp()


def fixed_noise(n=40):
    return FixedNoiseGaussianLikelihood(0.05 + torch.rand(n, generator=torch.Generator().manual_seed(1)).double())


MODELS = {
    "scaled ARD rbf": regression,
    "rbf": lambda: regression(kernel=RBFKernel()),
    "matern 5/2": lambda: regression(kernel=ScaleKernel(MaternKernel(2.5, ard_num_dims=3))),
    "matern 1/2 of two dimensions": lambda: regression(kernel=MaternKernel(0.5, active_dims=(0, 2))),
    "periodic": lambda: regression(kernel=ScaleKernel(PeriodicKernel())),
    "rq": lambda: regression(kernel=ScaleKernel(RQKernel())),
    "sum": lambda: regression(kernel=ScaleKernel(RBFKernel(active_dims=(0,))) + MaternKernel(1.5) + ConstantKernel()),
    "product": lambda: regression(kernel=ScaleKernel(RBFKernel() * PeriodicKernel(active_dims=(1,)))),
    "linear": lambda: regression(kernel=LinearKernel() + RBFKernel()),
    "fixed noise": lambda: regression(likelihood=fixed_noise()),
    "fixed and learnt noise": lambda: regression(
        likelihood=FixedNoiseGaussianLikelihood(torch.full((40,), 0.1).double(), learn_additional_noise=True)
    ),
    "batch": batched,
    "float32": lambda: regression(dtype=torch.float32),
    "mine": lambda: regression(kernel=ScaleKernel(Mine())),
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def assert_close(found, expected, where="", **tolerance):
    """Tensors in nested dicts and sequences, and what is no tensor, are the same."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert_close(found[name], expected[name], f"{where} {name}", **tolerance)
    elif isinstance(expected, (tuple, list)):
        for k, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{where} {k}", **tolerance)
    elif isinstance(expected, torch.Tensor):
        single = expected.dtype == torch.float32
        usual = {"rtol": 2e-3, "atol": 2e-4} if single else {"rtol": 1e-8, "atol": 1e-9}
        message = lambda text: f"{where}: {text}"  # noqa: E731
        torch.testing.assert_close(found, expected, **{"equal_nan": True, "msg": message, **usual, **tolerance})
    else:
        assert found == expected, where


def assert_stock(read, candidate=None, **tolerance):
    """What `read` returns is the same without and with autokern."""
    expected = read()
    with autokern.enabled(), autokern.using(force=candidate and {"predict": candidate}):
        assert_close(read(), expected, **tolerance)


def everything(posterior, likelihood=None):
    """What can be read of a distribution."""
    found = {"lazy": tuple(posterior.lazy_covariance_matrix.shape), "batch": tuple(posterior.batch_shape)}
    found |= {"mean": posterior.mean, "variance": posterior.variance, "stddev": posterior.stddev}
    found |= {"region": posterior.confidence_region()}
    independent = posterior.to_data_independent_dist()
    found |= {"independent": (independent.mean, independent.stddev)}
    if likelihood is not None:
        noisy = likelihood(posterior)
        found |= {"noisy variance": noisy.variance, "noisy": everything(noisy)}
        found |= {"density": noisy.log_prob(values(points(*noisy.mean.shape, seed=3)).to(noisy.mean))}
        torch.manual_seed(0)
        found |= {"sample": noisy.rsample(torch.Size([2]))}
        base = torch.randn(3, *posterior.mean.shape, generator=torch.Generator().manual_seed(0)).to(posterior.mean)
        found |= {"based sample": noisy.rsample(base_samples=base)}
    return found | {"covariance": posterior.covariance_matrix, "again": posterior.variance}


def derived(posterior):
    """Distributions made of one, none of which has been read."""
    return {
        "slice": posterior[..., 3:9],
        "steps": posterior[..., 1::3],
        "to the end": posterior[..., -4:],
        "one": posterior[2 % posterior.mean.shape[0]],
        "list": posterior[..., [1, 4]],
        "slice of slice": posterior[..., 2:9][..., 1:4],
        "expanded": posterior.expand(torch.Size([3, *posterior.batch_shape])),
        "unsqueezed": posterior.unsqueeze(0),
        "jitter": posterior.add_jitter(1e-3),
        "twice": posterior * 2,
        "sum": posterior + posterior,
        "shallow copy": copy.copy(posterior),
    }


# --- what is read -----------------------------------------------------------------------------------------------------


@each_model
@each_candidate
def test_everything_read_of_a_prediction_is_stocks(make, candidate):
    def read():
        model = make()
        posterior = model(points(11, seed=5, dtype=model.train_targets.dtype))
        fixed = isinstance(model.likelihood, FixedNoiseGaussianLikelihood)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gpytorch.utils.warnings.GPInputWarning)
            return everything(posterior, GaussianLikelihood().to(posterior.mean) if fixed else model.likelihood)

    assert_stock(read, candidate)


@each_model
@pytest.mark.parametrize("candidate", [None, "lazy", "lazy-product"])
def test_slices_and_other_derived_distributions_are_stocks(make, candidate):
    def read():
        model = make()
        at = points(11, seed=5, dtype=model.train_targets.dtype)
        found = {name: everything(part) for name, part in derived(model(at)).items()}
        return found | {"read before": [everything(p) for p in derived(read_before(model(at))).values()]}

    def read_before(posterior):
        posterior.covariance_matrix
        return posterior

    assert_stock(read, candidate)


@pytest.mark.parametrize("make", [batched, regression], ids=["models", "points"])
@each_candidate
def test_batches_and_their_parts(make, candidate):
    def read():
        model = make()
        posterior = model(points(3, 1, 11, seed=6) if make is batched else points(3, 11, seed=6))
        parts = {"first": posterior[0], "last": posterior[-1], "slice": posterior[1:, ..., 2:5], "all": posterior}
        return {name: everything(part) for name, part in parts.items()} | everything(posterior, model.likelihood)

    assert_stock(read, candidate)


@pytest.mark.parametrize("likelihood", [GaussianLikelihood, FixedNoiseGaussianLikelihood])
@each_candidate
def test_noise_with_a_batch_that_the_kernel_has_not(likelihood, candidate):
    def read():
        x, levels = points(30), torch.tensor([[0.1], [0.4]]).double()
        fixed = likelihood is FixedNoiseGaussianLikelihood
        noise = likelihood(levels.expand(2, 30).clone()) if fixed else likelihood(batch_shape=BATCH)
        if not fixed:
            noise.double().noise = levels
        model = Regression(x, torch.stack((values(x), -values(x))), None, noise, BATCH)
        with settings.fast_pred_var():  # without it stock fails below 512 points
            posterior = model(points(9, seed=1))
            density = posterior.log_prob(torch.zeros(9).double())
            return everything(posterior) | {"density": density, "first": everything(model(points(9, seed=1))[0])}

    assert_stock(read, candidate)


@pytest.mark.parametrize("candidate", [name for name in CANDIDATES if name != "stock"])
@pytest.mark.parametrize("model", ["scaled ARD rbf", "sum", "batch", "float32", "fixed noise"])
def test_each_candidate_runs_and_agrees_where_there_are_many_points(candidate, model):
    m = int(candidate.partition("@")[2] or 259) + 41

    def read():
        made = MODELS[model]()
        with torch.no_grad():
            posterior = made(points(m, seed=5, dtype=made.train_targets.dtype))
            part = posterior[..., m // 2 : m // 2 + 9]
            return posterior.mean, posterior.variance, part.variance, part.covariance_matrix

    assert_stock(read, candidate)
    assert dispatch.stats()["predict"].get(candidate)


@each_way
@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("candidate", [None, *SMALL])
def test_settings_that_shape_a_prediction(fast, detached, skip, candidate):
    def read():
        shaping = settings.fast_pred_var(fast), settings.detach_test_caches(detached), settings.skip_posterior_variances(skip)
        with shaping[0], shaping[1], shaping[2]:
            model = regression()
            first, second = (model(points(m, seed=m)) for m in (11, 600))
            return first.mean, first.covariance_matrix, second.mean, second.lazy_covariance_matrix.diagonal()

    assert_stock(read, candidate)


@pytest.mark.parametrize("policy", ["ignore", "mask", "fill"])
@pytest.mark.parametrize("candidate", [None, *SMALL, "rows@256"])
def test_missing_observations(policy, candidate):
    def read():
        model = regression()
        model.train_targets[3:6] = torch.nan
        with settings.observation_nan_policy(policy), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            posterior = model(points(300, seed=5))
            return posterior.mean, posterior.variance, model(points(4, seed=6)).covariance_matrix

    assert_stock(read, candidate)


class Several(gpytorch.models.ExactGP):
    """Several tasks: one Kronecker product, or a batch of independent ones."""

    def __init__(self, x, y, kind):
        super().__init__(x, y, MultitaskGaussianLikelihood(num_tasks=2))
        torch.manual_seed(0)
        self.kind, batch = kind, BATCH if kind == "independent" else torch.Size()
        self.mean_module = ConstantMean(batch_shape=batch) if batch else MultitaskMean(ConstantMean(), num_tasks=2)
        self.covar_module = RBFKernel(batch_shape=batch) if batch else MultitaskKernel(RBFKernel(), num_tasks=2, rank=1)
        self.to(x).eval()

    def forward(self, x):
        mean, covariance = self.mean_module(x), self.covar_module(x)
        if self.kind == "independent":
            return MultitaskMultivariateNormal.from_batch_mvn(MultivariateNormal(mean, covariance))
        return MultitaskMultivariateNormal(mean, covariance)


class Hadamard(gpytorch.models.ExactGP):
    """One of two tasks at each point."""

    def __init__(self, x, task, y):
        super().__init__((x, task), y, GaussianLikelihood())
        torch.manual_seed(0)
        self.mean_module, self.covar_module, self.tasks = ConstantMean(), RBFKernel(), IndexKernel(num_tasks=2, rank=1)
        self.to(x).eval()

    def forward(self, x, task):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x).mul(self.tasks(task)))


def tasks(m):
    return (torch.arange(m) % 2).unsqueeze(-1)


def several(kind, n=30):
    x = points(n)
    if kind == "hadamard":
        return Hadamard(x, tasks(n), values(x) + tasks(n)[:, 0])
    return Several(x, torch.stack((values(x), -values(x)), dim=-1), kind)


def at(kind, m, seed=5):
    return (points(m, seed=seed), tasks(m)) if kind == "hadamard" else (points(m, seed=seed),)


@each_way
@pytest.mark.parametrize("m", [9, 301])
@pytest.mark.parametrize("kind", ["kronecker", "independent", "hadamard"])
def test_several_tasks(kind, m, fast):
    def read():
        with settings.fast_pred_var(fast):
            model = several(kind)
            posterior, noisy = model(*at(kind, m)), model.likelihood(model(*at(kind, m)))
            parts = [posterior[..., 2:7, :], posterior[..., 1, :]] if kind != "hadamard" else [posterior[2:7]]
            return [[d.mean, d.variance, d.covariance_matrix, d.variance] for d in (posterior, noisy, *parts)]

    assert_stock(read)


def truth(model, x):
    """Mean and covariance in float64 by dense algebra."""
    model = copy.deepcopy(model).double()
    with torch.no_grad(), settings.prior_mode():
        z = model.train_inputs[0]
        k = model.likelihood(model(z)).covariance_matrix
        rows = model.covar_module(x.double(), z).to_dense()
        solution = torch.linalg.solve(k, rows.mT).mT
        mean = model.mean_module(x.double()) + solution @ (model.train_targets - model.mean_module(z))
        return mean, model.covar_module(x.double()).to_dense() - solution @ rows.mT


@pytest.mark.parametrize("candidate", ["lazy", "lazy-product", "eager"])
def test_above_800_points_a_prediction_is_exact(candidate):
    model, x = regression(820), points(12, seed=5)
    mean, covariance = truth(model, x)
    with autokern.enabled(), autokern.using(force={"predict": candidate}), torch.no_grad():
        posterior = model(x)
        assert_close(posterior.mean, mean, rtol=1e-8, atol=1e-8)
        assert_close(posterior.variance, covariance.diagonal(), rtol=1e-8, atol=1e-8)
        assert_close(posterior.covariance_matrix, covariance, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("tolerance", [1e-8, 0.01])
def test_the_tolerance_for_predictions_holds_when_variances_are_read(tolerance):
    """Where the user orders conjugate gradients, they run to `eval_cg_tolerance`, not to that of training."""
    model, x = regression(300, kernel=MaternKernel(0.5)), points(400, seed=5)
    model.likelihood.noise = 1e-3

    def off():
        torch.manual_seed(0)
        with settings.max_cholesky_size(20), settings.eval_cg_tolerance(tolerance), torch.no_grad():
            return (copy.deepcopy(model)(x).variance - truth(model, x)[1].diagonal()).abs().max().item()

    stock = off()
    with autokern.enabled():
        assert off() <= 1.1 * stock + 1e-12


@pytest.mark.parametrize("make", [regression, batched, lambda: several("kronecker")], ids=["one", "batch", "tasks"])
def test_distributions_are_pickled_and_copied_without_autokern(make):
    with autokern.enabled(), autokern.using(force={"predict": "lazy"}), torch.no_grad():
        model = make()
        posterior = model(points(300, seed=5))
        for distribution in (posterior, model.likelihood(posterior), posterior.add_jitter(1e-3)):
            packed, twin = pickle.dumps(distribution), copy.deepcopy(distribution)
            assert b"autokern" not in packed
            for other in (pickle.loads(packed), twin):
                assert_close(other.variance, distribution.variance)
                assert_close(other.covariance_matrix, distribution.covariance_matrix)


# --- gradients --------------------------------------------------------------------------------------------------------

READINGS = {
    "mean": lambda p: p.mean.sum(),
    "variance": lambda p: p.variance.square().sum(),
    "joint": lambda p: p.add_jitter(1e-3).covariance_matrix.logdet().sum(),
    "part": lambda p: p[..., 1:4].variance.sum() + p[..., 2:5].covariance_matrix.square().sum(),
    "all": lambda p: p.mean.square().sum() + p.variance.sqrt().sum() + p.covariance_matrix.square().sum(),
}
each_reading = pytest.mark.parametrize("of", READINGS.values(), ids=READINGS)


@each_reading
@each_candidate
@pytest.mark.parametrize("model", ["scaled ARD rbf", "matern 5/2", "sum", "periodic", "batch"])
def test_gradients_by_test_points(model, candidate, of):
    def read():
        x = points(7, seed=5).requires_grad_()
        return torch.autograd.grad(of(MODELS[model]()(x)), x)

    assert_stock(read, candidate, rtol=1e-6, atol=1e-9)


@each_way
@each_reading
@each_candidate
@pytest.mark.parametrize("detached", [False, True], ids=["attached", "default"])
def test_gradients_by_hyperparameters(fast, of, candidate, detached):
    def read():
        with settings.detach_test_caches(detached), settings.fast_pred_var(fast):
            model = regression()
            loss = of(model(points(7, seed=5)))
            return torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True, allow_unused=True)

    assert_stock(read, candidate, rtol=1e-6, atol=1e-9)


@each_candidate
def test_gradients_survive_readings_without_gradients(candidate):
    """A prediction under `no_grad` in between leaves the graph of the first one whole."""

    def read():
        with settings.detach_test_caches(False), settings.fast_pred_var():
            model = regression()
            posterior = model(points(7, seed=5))
            with torch.no_grad():
                model(points(5, seed=6)).covariance_matrix
                posterior.mean, model.prediction_strategy.covar_cache
            return torch.autograd.grad(posterior.variance.sum(), list(model.covar_module.parameters()))

    assert_stock(read, candidate, rtol=1e-6)


@each_candidate
@pytest.mark.parametrize("detached", [True, False])
def test_two_backward_passes_and_a_prediction_after_them(candidate, detached):
    def read():
        with settings.detach_test_caches(detached):
            model, x = regression(), points(7, seed=5).requires_grad_()
            posterior = model(x)
            loss = posterior.mean.sum() + posterior.variance.sum()
            loss.backward(retain_graph=True)
            posterior.variance.sum().backward(retain_graph=True)
            loss.backward()
            after = model(points(7, seed=6))
            return x.grad, after.mean, after.variance

    assert_stock(read, candidate)


@pytest.mark.parametrize("candidate", ["lazy", "rows@256"])
def test_second_derivatives_by_test_points(candidate):
    def read():
        x = points(300, seed=5).requires_grad_()
        posterior = regression(12)(x)
        (first,) = torch.autograd.grad(posterior.mean.sum() + posterior.variance.sum(), x, create_graph=True)
        return first, torch.autograd.grad(first.square().sum(), x)

    assert_stock(read, candidate, rtol=1e-6)


@pytest.mark.parametrize("candidate", ["lazy", "rows@256"])
@pytest.mark.parametrize("reading", ["mean", "variance"])
@pytest.mark.parametrize("detached", [True, False])
def test_a_backward_pass_after_autokern_is_disabled(candidate, reading, detached):
    def loss():
        model, x = regression(), points(300, seed=5).requires_grad_()
        return getattr(model(x), reading).sum(), [x, *model.covar_module.parameters()]

    with settings.detach_test_caches(detached):
        expected = torch.autograd.grad(*loss())[0]
        with autokern.enabled(), autokern.using(force={"predict": candidate}):
            found, leaves = loss()
    assert_close(torch.autograd.grad(found, leaves)[0], expected, rtol=1e-6)


def change(model, by=0.7):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


@pytest.mark.parametrize("candidate", ["lazy", "rows@256"])
@pytest.mark.parametrize("reading", ["mean", "variance"])
def test_a_backward_pass_after_a_change_is_that_of_the_old_values(candidate, reading):
    def read():
        model, x = regression(), points(300, seed=5).requires_grad_()
        loss = getattr(model(x), reading).sum()
        change(model)
        return torch.autograd.grad(loss, x)

    assert_stock(read, candidate, rtol=1e-6)


@each_candidate
def test_without_gradients_there_is_no_graph(candidate):
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        model, x = regression(), points(11, seed=5).requires_grad_()
        with torch.no_grad():
            posterior = model(x)
        readings = [posterior.mean, posterior.variance, posterior[2:5].variance, posterior.covariance_matrix]
        readings += [posterior.stddev, posterior.lazy_covariance_matrix.diagonal()]
        assert not any(t.requires_grad for t in readings)
        assert model(x).variance.requires_grad


# --- changes in place -------------------------------------------------------------------------------------------------


@each_model
@pytest.mark.parametrize("candidate", ["lazy", "lazy-product", "eager"])
def test_what_is_read_late_is_of_the_hyperparameters_at_the_call(make, candidate):
    def read(late):
        model = make()
        with torch.no_grad():
            made = [model(points(300, seed=5, dtype=model.train_targets.dtype)) for _ in range(3)]
            change(model if late else model.likelihood, 0.7 if late else 0.0)
            return made[0].mean, made[0].variance, made[1].covariance_matrix, made[2][..., 3:9].covariance_matrix

    expected = read(False)
    with autokern.enabled(), autokern.using(force={"predict": candidate}):
        assert_close(read(True), expected)


def assignments():
    def inputs(model):
        model.train_inputs[0].mul_(0.9)

    def targets(model):
        model.train_targets.add_(1.0)

    def step(model):
        optimiser = torch.optim.Adam(model.parameters(), lr=0.3)
        model(points(3, seed=9)).mean.sum().backward()
        optimiser.step()

    def load(model):
        model.load_state_dict({name: value + 0.5 for name, value in model.state_dict().items()})

    return {"parameters": change, "inputs": inputs, "targets": targets, "optimiser": step, "state": load}


@each_candidate
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("how", assignments().values(), ids=assignments())
def test_after_a_change_in_place_a_prediction_is_that_of_a_fresh_model(how, candidate, fast):
    with autokern.enabled(), autokern.using(force={"predict": candidate}), settings.fast_pred_var(fast):
        model, x = regression(), points(7, seed=5)
        model(x).variance
        how(model)
        twin = Regression(*model.train_inputs, model.train_targets)
        twin.load_state_dict(model.state_dict())
        for _ in range(2):
            found, expected = model(x), twin(x)
            assert_close([found.mean, found.variance], [expected.mean, expected.variance])


def test_an_assignment_through_data_leaves_the_caches():
    with autokern.enabled():
        model, x = regression(), points(7, seed=5)
        model(x).variance
        before = model.prediction_strategy, model.prediction_strategy.mean_cache
        for parameter in model.parameters():
            parameter.data.add_(0.5)
        model.covar_module.outputscale = 3.0
        model(x).variance
        assert model.prediction_strategy is before[0]
        assert model.prediction_strategy.mean_cache is before[1]


# --- what is computed -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def evaluated():
    """The shapes of kernel matrices that are evaluated, and of posterior covariances that are formed."""
    shapes = []

    def watching(kind, name):
        real = getattr(kind, name)

        @functools.wraps(real)
        def watched(self, *args, **kwargs):
            shapes.append(tuple(self.shape[-2:]))
            return real(self, *args, **kwargs)

        return mock.patch.object(kind, name, watched)

    with watching(LazyEvaluatedKernelTensor, "evaluate_kernel"), watching(PosteriorCovariance, "formed"):
        yield shapes


@pytest.mark.parametrize(
    ("make", "candidate"),
    [
        (regression, "lazy"),
        (regression, "lazy-product"),
        (regression, "rows@256"),
        (batched, "lazy"),
        (lambda: regression(kernel=ScaleKernel(Mine())), "rows@1024"),
        (lambda: several("kronecker"), None),
    ],
    ids=["lazy", "lazy-product", "rows@256", "batch", "mine", "tasks"],
)
@each_way
def test_the_covariance_of_all_test_points_is_never_formed_for_variances(make, candidate, fast):
    model, m = make(), 3000
    forced = {"predict": candidate} if candidate else None
    with autokern.enabled(), autokern.using(force=forced), settings.fast_pred_var(fast), evaluated() as shapes:
        posterior = model(points(m, seed=5))
        posterior.mean, posterior.variance, posterior.stddev, posterior.confidence_region()
        noisy = model.likelihood(posterior)
        noisy.mean, noisy.variance, noisy.confidence_region()
        posterior[..., 5:9] if candidate else None
    assert shapes
    assert not [shape for shape in shapes if min(shape) >= m]


@each_way
@pytest.mark.parametrize("candidate", [None, *SMALL])
@pytest.mark.parametrize("detached", [True, False])
def test_a_model_is_factorised_once(fast, candidate, detached):
    real, sizes = torch.linalg.cholesky_ex, []
    counting = mock.patch("torch.linalg.cholesky_ex", lambda a, *r, **k: sizes.append(a.shape[-1]) or real(a, *r, **k))
    with autokern.enabled(), autokern.using(force=candidate and {"predict": candidate}), counting:
        with settings.fast_pred_var(fast), settings.detach_test_caches(detached):
            model = regression(120)
            for seed in (5, 6):
                posterior = model(points(30, seed=seed))
                posterior.mean, posterior.variance
            model.get_fantasy_model(points(2, seed=7), values(points(2, seed=7)))(points(5)).variance
    assert sizes.count(120) == 1


# --- fantasies --------------------------------------------------------------------------------------------------------


def fantasy(make, new, targets=None, reads=6, **options):
    """Predict, imagine observations, and return the new model."""
    model = make()
    model(points(reads, seed=5, dtype=model.train_targets.dtype))
    new = new.to(model.train_targets)
    return model.get_fantasy_model(new, values(new) if targets is None else targets.to(new), **options)


def read_of(model, m=6):
    posterior = model(points(m, seed=8, dtype=model.train_targets.dtype))
    return {"mean": posterior.mean, "covariance": posterior.covariance_matrix, "variance": posterior.variance}


def refit(model):
    """A model of the same data that has predicted nothing."""
    twin = copy.deepcopy(model)
    twin.train_inputs, twin.train_targets, twin.prediction_strategy = model.train_inputs, model.train_targets, None
    return twin


CASES = {
    "one": ((1,), None),
    "two": ((2,), None),
    "five": ((5,), None),
    "batch": ((4, 2), None),
    "batches": ((3, 4, 2), None),
    "targets": ((2,), (3, 2)),
    "batch of points and of targets": ((4, 2), (3, 4, 2)),
}


@each_way
@pytest.mark.parametrize(("shape", "targets"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("model", ["scaled ARD rbf", "sum", "float32", "linear", "batch", "mine"])
def test_fantasies_are_stocks_and_those_of_a_refit(model, shape, targets, fast):
    if model == "batch":
        shape = (2, *shape) if len(shape) == 1 else (*shape[:-2], shape[-2], 2, shape[-1])
        targets = None if targets is None else (*targets[:-1], 2, targets[-1])

    def read():
        drawn = None if targets is None else torch.randn(targets, generator=torch.Generator().manual_seed(1))
        return read_of(fantasy(MODELS[model], points(*shape, seed=7), drawn))

    with settings.fast_pred_var(fast), torch.no_grad():
        assert_stock(read)
