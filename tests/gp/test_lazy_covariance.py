"""Predictions of exact models and their fantasies: what is read of them, gradients, caches, memory; against stock."""

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
from gpytorch import kernels, settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, MultitaskMean

import autokern
from autokern.core.registry import get
from autokern.gp.lazy_covariance import PosteriorCovariance
from autokern.hooks import memory
from autokern.hooks import prediction as seam
from autokern.runtime import dispatch

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # of stock's interpolation
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # of the same
    pytest.mark.filterwarnings("ignore:torch.sparse.SparseTensor"),
]
CANDIDATES = get("predict").names()
SMALL = [name for name in CANDIDATES if name != "rows"]
each_candidate = pytest.mark.parametrize("candidate", SMALL)
each_way = pytest.mark.parametrize("fast", [False, True], ids=["solve", "fast"])
either_cache = pytest.mark.parametrize("detached", [True, False], ids=["detached", "attached"])
NONE, BATCH = torch.Size(), torch.Size([2])


class Regression(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel=None, likelihood=None, batch=NONE, form=None):
        super().__init__(x, y, likelihood or GaussianLikelihood(batch_shape=batch))
        self.mean_module = ConstantMean(batch_shape=batch)
        self.covar_module = kernel or ScaleKernel(RBFKernel(ard_num_dims=x.shape[-1]))
        self.form = form or (lambda kernel, x: kernel(x))
        if likelihood is None:
            self.likelihood.noise = torch.full((*batch, 1), 0.05)
        self.to(x).eval()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.form(self.covar_module, x))


def points(*shape, seed=0, dtype=torch.float64):
    return torch.rand(*shape, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def values(x):
    return (4 * x[..., 0]).sin() + x[..., 1]


def regression(n=40, kernel=None, likelihood=None, dtype=torch.float64, form=None):
    x = points(n, dtype=dtype)
    return Regression(x, values(x), kernel, likelihood, form=form)


def batched(n=25):
    kernel = ScaleKernel(RBFKernel(ard_num_dims=3, batch_shape=BATCH), batch_shape=BATCH)
    kernel.outputscale = torch.tensor([0.5, 2.0])
    return Regression(points(2, n), values(points(2, n)), kernel, batch=BATCH)


class Mine(kernels.Kernel):
    """A kernel as people write them, without a thought of diagonals; the library takes those of the whole matrix."""

    has_lengthscale = True

    def forward(self, x1, x2, **params):
        return (-(x1.unsqueeze(-2) - x2.unsqueeze(-3)).div(self.lengthscale).square().sum(-1)).exp()


def fixed_noise(**options):
    return FixedNoiseGaussianLikelihood(0.05 + torch.arange(40).double() / 80, **options)


MODELS = {
    "ard": regression,
    "matern 5/2": lambda: regression(kernel=ScaleKernel(kernels.MaternKernel(2.5, ard_num_dims=3))),
    "periodic": lambda: regression(kernel=ScaleKernel(PeriodicKernel())),
    "rq": lambda: regression(kernel=ScaleKernel(kernels.RQKernel())),
    "sum": lambda: regression(
        kernel=ScaleKernel(RBFKernel(active_dims=(0,))) + kernels.MaternKernel(1.5) + kernels.ConstantKernel()
    ),
    "product": lambda: regression(kernel=ScaleKernel(RBFKernel() * PeriodicKernel(active_dims=(1,)))),
    "linear": lambda: regression(kernel=kernels.LinearKernel() + RBFKernel()),
    "fixed noise": lambda: regression(likelihood=fixed_noise()),
    "batch": batched,
    "float32": lambda: regression(dtype=torch.float32),
    "mine": lambda: regression(kernel=ScaleKernel(Mine())),
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def assert_close(found, expected, where="", **tolerance):
    """Tensors in nested dicts and sequences, and what is no tensor, are the same."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.items()), list(expected.items())
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for k, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{where}/{other[0] if type(other) is tuple and other else k}", **tolerance)
    elif isinstance(expected, torch.Tensor):
        single = expected.dtype == torch.float32
        usual = {"rtol": 2e-3, "atol": 2e-4} if single else {"rtol": 1e-8, "atol": 1e-9}
        options = {"equal_nan": True, "msg": lambda text: f"{where}: {text}", **usual, **tolerance}
        torch.testing.assert_close(found, expected, **options)
    else:
        assert found == expected, where


@contextlib.contextmanager
def ours(candidate=None):
    with autokern.enabled(), autokern.using(force=candidate and {"predict": candidate}):
        yield


def assert_stock(read, candidate=None, **tolerance):
    """What `read` returns is the same without and with autokern."""
    expected = read()
    with ours(candidate):
        assert_close(read(), expected, **tolerance)


def at(model, m, seed=5):
    return points(m, seed=seed, dtype=model.train_targets.dtype)


def moments(posterior):
    found = {"shapes": (*posterior.lazy_covariance_matrix.shape, *posterior.batch_shape)}
    found |= {"mean": posterior.mean, "variance": posterior.variance, "stddev": posterior.stddev}
    return found | {"covariance": posterior.covariance_matrix, "again": posterior.variance}


def everything(posterior, likelihood):
    """What is asked of a distribution, and of those made of it."""
    independent, noisy = posterior.to_data_independent_dist(), likelihood(posterior)
    base = torch.randn(3, *posterior.mean.shape, generator=torch.Generator().manual_seed(0)).to(posterior.mean)
    density = noisy.log_prob(base[0]), noisy.log_prob(base)
    torch.manual_seed(0)
    samples = noisy.rsample(torch.Size([2])), noisy.rsample(base_samples=base)
    made = {
        "slice": posterior[..., 3:9], "steps": posterior[..., 1::3], "end": posterior[..., -4:],
        "list": posterior[..., [1, 4]], "slice of slice": posterior[..., 2:9][..., 1:4], "noisy": noisy,
        "expanded": posterior.expand(torch.Size([3, *posterior.batch_shape])), "unsqueezed": posterior.unsqueeze(0),
        "jitter": posterior.add_jitter(1e-3), "twice": posterior * 2, "sum": posterior + posterior,
    }  # fmt: skip
    found = {"independent": (independent.mean, independent.stddev), "region": posterior.confidence_region()}
    found |= {"density": density, "samples": samples, "one": posterior.lazy_covariance_matrix.diagonal()[..., 2]}
    return found | {name: moments(part) for name, part in made.items()} | moments(posterior)


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.thin("make", "candidate")
@each_model
@each_candidate
def test_everything_read_of_a_prediction_is_stocks(make, candidate):
    def read():
        model = make()
        posterior = model(at(model, 11))
        fixed = isinstance(model.likelihood, FixedNoiseGaussianLikelihood)
        return everything(posterior, GaussianLikelihood().to(posterior.mean) if fixed else model.likelihood)

    assert_stock(read, candidate)


@pytest.mark.thin("make", "candidate")
@pytest.mark.parametrize("make", [batched, regression], ids=["models", "points"])
@each_candidate
def test_batches_and_their_parts(make, candidate):
    def read():
        model = make()
        x = points(3, 1, 11, seed=6) if make is batched else points(3, 11, seed=6)
        parts = [model(x)[0], model(x)[-1], model(x)[1:, ..., 2:5], model(x)[..., [0, 3]]]
        return [moments(part) for part in parts], everything(model(x), model.likelihood)

    assert_stock(read, candidate)


@pytest.mark.parametrize("fixed", [True, False])
@each_candidate
def test_noise_with_a_batch_that_the_kernel_has_not(fixed, candidate):
    def read():
        x, levels = points(30), torch.tensor([[0.1], [0.4]]).double()
        noise = FixedNoiseGaussianLikelihood(levels.expand(2, 30).clone()) if fixed else None
        model = Regression(x, torch.stack((values(x), -values(x))), None, noise, BATCH)
        with settings.fast_pred_var():  # without it stock fails below 512 points
            posterior, again = model(points(9, seed=1)), model(points(9, seed=1))
            first, density = model(points(9, seed=1))[0], again.log_prob(values(points(9, seed=2)))
            return moments(posterior), density, moments(first)

    assert_stock(read, candidate)


@pytest.mark.parametrize("candidate", [n for n in CANDIDATES if n not in ("stock", "state-space")])
@pytest.mark.parametrize("model", ["ard", "sum", "batch", "float32", "fixed noise"])
def test_each_candidate_serves_many_points(candidate, model):
    m = 1100 if candidate == "rows" else 300

    def read():
        made = MODELS[model]()
        with torch.no_grad():
            posterior = made(at(made, m))
            part = posterior[..., m // 2 : m // 2 + 9]
            return posterior.mean, posterior.variance, part.variance, part.covariance_matrix

    assert_stock(read, candidate)
    assert dispatch.stats()["predict"].get(candidate)


@pytest.mark.thin
@each_way
@either_cache
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("candidate", [None, *SMALL])
def test_settings_that_shape_a_prediction(fast, detached, skip, candidate):
    def read():
        caches, skipping = settings.detach_test_caches(detached), settings.skip_posterior_variances(skip)
        with settings.fast_pred_var(fast), caches, skipping:
            model = regression()
            first, second = (model(points(m, seed=m)) for m in (11, 600))
            return first.mean, first.covariance_matrix, second.mean, second.lazy_covariance_matrix.diagonal()

    assert_stock(read, candidate)


@pytest.mark.thin("policy", "candidate")
@pytest.mark.parametrize("policy", ["ignore", "mask", "fill"])
@pytest.mark.parametrize("candidate", [None, *CANDIDATES])
def test_missing_observations(policy, candidate):
    def read():
        model = regression()
        model.train_targets[3:6] = torch.nan
        with settings.observation_nan_policy(policy), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            posterior = model(points(1100, seed=5))
            return posterior.mean, posterior.variance, model(points(4, seed=6)).covariance_matrix

    assert_stock(read, candidate)


class Several(gpytorch.models.ExactGP):
    """Two tasks: one Kronecker product, a batch of independent ones, or one of them at each point (Hadamard)."""

    def __init__(self, kind, n=30):
        (x, *task), each, batch = several_at(kind, n, 0), kind == "hadamard", BATCH if kind == "independent" else NONE
        y = values(x) + tasks(n)[:, 0] if each else torch.stack((values(x), -values(x)), dim=-1)
        super().__init__((x, *task), y, GaussianLikelihood() if each else MultitaskGaussianLikelihood(num_tasks=2))
        torch.manual_seed(0)
        self.kind, self.covar_module = kind, RBFKernel(batch_shape=batch)
        self.mean_module, self.tasks = ConstantMean(batch_shape=batch), kernels.IndexKernel(num_tasks=2, rank=1)
        if kind == "kronecker":
            self.mean_module = MultitaskMean(ConstantMean(), num_tasks=2)
            self.covar_module = kernels.MultitaskKernel(RBFKernel(), num_tasks=2, rank=1)
        self.to(x).eval()

    def forward(self, x, task=None):
        mean, covariance = self.mean_module(x), self.covar_module(x)
        if self.kind == "hadamard":
            return MultivariateNormal(mean, covariance.mul(self.tasks(task)))
        if self.kind == "independent":
            return MultitaskMultivariateNormal.from_batch_mvn(MultivariateNormal(mean, covariance))
        return MultitaskMultivariateNormal(mean, covariance)


def tasks(m):
    return (torch.arange(m) % 2).unsqueeze(-1)


def several_at(kind, m, seed=5):
    return (points(m, seed=seed), tasks(m)) if kind == "hadamard" else (points(m, seed=seed),)


KINDS = ["kronecker", "independent", "hadamard"]


@pytest.mark.thin
@each_way
@pytest.mark.parametrize("m", [9, 301])
@pytest.mark.parametrize("kind", KINDS)
def test_several_tasks(kind, m, fast):
    def read():
        with settings.fast_pred_var(fast):
            model = Several(kind)
            x, *more = several_at(kind, m)
            posterior = model(x.requires_grad_(), *more)
            (slope,) = torch.autograd.grad(posterior.mean.sum() + posterior.variance.sum(), x)
            posterior, noisy = model(x, *more), model.likelihood(model(x, *more))
            parts = [posterior[..., 2:7, :], posterior[..., 1, :]] if kind != "hadamard" else [posterior[2:7]]
            read = [[d.mean, d.variance, d.covariance_matrix, d.variance] for d in (posterior, noisy, *parts)]
            return slope, read, posterior.confidence_region()

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


@pytest.mark.parametrize("candidate", ["lazy", "lazy-product"])
def test_above_800_points_a_prediction_is_exact(candidate):
    model, x = regression(820), points(12, seed=5)
    mean, covariance = truth(model, x)
    with ours(candidate), torch.no_grad():
        posterior = model(x)
        found = [posterior.mean, posterior.variance, posterior.covariance_matrix]
        assert_close(found, [mean, covariance.diagonal(), covariance], rtol=0, atol=1e-8)


def test_the_tolerance_for_predictions_holds_when_variances_are_read():
    """Where the user orders conjugate gradients, they run to `eval_cg_tolerance`, not to that of training."""
    model, x = regression(300, kernel=kernels.MaternKernel(0.5)), points(400, seed=5)

    def off():
        torch.manual_seed(0)
        with settings.max_cholesky_size(20), settings.eval_cg_tolerance(1e-5), torch.no_grad():
            return (copy.deepcopy(model)(x).variance - truth(model, x)[1].diagonal()).abs().max().item()

    stock = off()
    with ours():
        assert off() <= 1.1 * stock + 1e-12


@pytest.mark.parametrize("make", [regression, batched, lambda: Several("kronecker")], ids=["one", "batch", "tasks"])
def test_distributions_are_pickled_and_copied_without_autokern(make):
    with ours("lazy"), torch.no_grad():
        model = make()
        posterior = model(points(300, seed=5))
        for distribution in (posterior, model.likelihood(posterior), posterior.add_jitter(1e-3), posterior * 2):
            packed, twin = pickle.dumps(distribution), copy.deepcopy(distribution)
            assert b"autokern" not in packed
            for other in (pickle.loads(packed), twin):
                assert_close(other.variance, distribution.variance)
                assert_close(other.covariance_matrix, distribution.covariance_matrix)


@pytest.mark.parametrize("op", ["predict", "fantasy"])
def test_equal_keys_mean_equal_problems(op, monkeypatch):
    known, x = {}, points(30)
    real = getattr(seam, f"_dispatch_{op}")

    def noted(*args):
        key, problem = get(op).key(*args), get(op).problem_of(*args)
        assert known.setdefault(key, problem) == problem
        return real(*args)

    monkeypatch.setattr(seam, f"_dispatch_{op}", noted)
    makes = [*MODELS.values(), *(functools.partial(Several, kind) for kind in KINDS)]
    for batch in (NONE, BATCH):  # of the kernel alone
        kernel = functools.partial(ScaleKernel, RBFKernel(batch_shape=batch), batch_shape=batch)
        y = torch.stack((values(x), -values(x)))
        makes.append(lambda kernel=kernel, y=y: Regression(x, y, kernel(), None, BATCH))
    with ours(), settings.fast_pred_var(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make in makes:
            model = make()
            inputs, *task = several_at(getattr(model, "kind", ""), 9)
            model(inputs.to(model.train_targets), *task)
            with contextlib.suppress(RuntimeError, ValueError):  # stock's, where these points do not fit
                fantasy(model, points(2, seed=7), torch.ones(*model.train_targets.shape[:-1], 2))
    assert len(known) > 3


# --- gradients --------------------------------------------------------------------------------------------------------

READINGS = {
    "mean": lambda p: p.mean.sum(),
    "variance": lambda p: p.variance.square().sum(),
    "joint": lambda p: p.add_jitter(1e-3).covariance_matrix.logdet().sum(),
    "all": lambda p: p.mean.square().sum() + p[..., 1:4].variance.sum() + p[..., 2:5].covariance_matrix.square().sum(),
}
each_reading = pytest.mark.parametrize("of", READINGS.values(), ids=READINGS)


@pytest.mark.thin
@each_reading
@each_candidate
@pytest.mark.parametrize("model", ["ard", "matern 5/2", "sum", "periodic", "batch"])
def test_gradients_by_test_points(model, candidate, of):
    def read():
        x = points(7, seed=5).requires_grad_()
        return torch.autograd.grad(of(MODELS[model]()(x)), x)

    assert_stock(read, candidate, rtol=1e-6, atol=1e-9)


def by_hyperparameters(of):
    model = regression()
    loss, leaves = of(model(points(7, seed=5))), list(model.parameters())
    return torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)


@pytest.mark.thin
@each_way
@each_reading
@each_candidate
def test_gradients_by_hyperparameters(fast, of, candidate):
    with settings.detach_test_caches(False), settings.fast_pred_var(fast):
        assert_stock(lambda: by_hyperparameters(of), candidate, rtol=1e-6)


@each_way
@each_reading
def test_gradients_by_hyperparameters_with_detached_caches(fast, of):
    """Where nothing is cached of variances, without `fast_pred_var`, stock detaches the noise only."""
    with settings.fast_pred_var(fast):
        assert_stock(lambda: by_hyperparameters(of), rtol=1e-6)


@each_candidate
def test_gradients_survive_readings_without_gradients(candidate):
    """A prediction or fantasy under `no_grad` in between leaves the graph of the first prediction whole."""

    def read():
        with settings.detach_test_caches(False), settings.fast_pred_var():
            model = regression()
            posterior = model(points(7, seed=5))
            with torch.no_grad():
                model(points(5, seed=6)).covariance_matrix
                model.get_fantasy_model(points(2, seed=7), values(points(2, seed=7)))
            return torch.autograd.grad(posterior.variance.sum(), list(model.covar_module.parameters()))

    assert_stock(read, candidate, rtol=1e-6)


@pytest.mark.thin("candidate", "detached")
@each_candidate
@either_cache
def test_two_backward_passes_and_a_prediction_after_them(candidate, detached):
    def read():
        with settings.detach_test_caches(detached):
            model, x = regression(), points(7, seed=5).requires_grad_()
            posterior = model(x)
            loss = posterior.mean.sum() + posterior.variance.sum()
            loss.backward(retain_graph=True)
            posterior.variance.sum().backward(retain_graph=True)
            loss.backward()
            return x.grad, moments(model(points(7, seed=6)))

    assert_stock(read, candidate)


def test_second_derivatives_by_test_points():
    def read():
        x = points(300, seed=5).requires_grad_()
        posterior = regression(12)(x)
        (first,) = torch.autograd.grad(posterior.mean.sum() + posterior.variance.sum(), x, create_graph=True)
        return first, torch.autograd.grad(first.square().sum(), x)

    assert_stock(read, "lazy", rtol=1e-6)


@pytest.mark.parametrize("reading", ["mean", "variance"])
@pytest.mark.parametrize("between", ["disabled", "changed"])
def test_a_backward_pass_is_that_of_the_forward_pass(reading, between):
    """Blocks that are evaluated again see neither hooks nor hyperparameters that are others by then."""

    def loss():
        model, x = regression(), points(300, seed=5).requires_grad_()
        found = getattr(model(x), reading).sum()
        change(model, 0.7 if between == "changed" else 0.0)
        return found, x

    expected = torch.autograd.grad(*loss())
    with ours("lazy"):
        found = loss()
        if between == "changed":
            found = torch.autograd.grad(*found)
    assert_close(torch.autograd.grad(*found) if between == "disabled" else found, expected, rtol=1e-6)


@each_candidate
def test_without_gradients_there_is_no_graph(candidate):
    with ours(candidate):
        model, x = regression(), points(11, seed=5).requires_grad_()
        with torch.no_grad():
            posterior = model(x)
        readings = [posterior.mean, posterior.variance, posterior[2:5].variance, posterior.covariance_matrix]
        assert not any(t.requires_grad for t in [*readings, posterior.lazy_covariance_matrix.diagonal()])
        assert model(x).variance.requires_grad


# --- changes in place -------------------------------------------------------------------------------------------------


def change(model, by=0.7):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


LATE = MODELS | {
    "sum of operators": lambda: regression(form=lambda kernel, x: kernel(x) + kernel(x)),
    "jitter in forward": lambda: regression(form=lambda kernel, x: kernel(x).add_jitter(1e-3)),
    "independent": lambda: Several("independent"),  # of a Kronecker product stock forgets the old values itself
    "hadamard": lambda: Several("hadamard"),
}


@pytest.mark.thin("make", "candidate")
@pytest.mark.parametrize("make", LATE.values(), ids=LATE)
@pytest.mark.parametrize("candidate", ["lazy", "lazy-product"])
def test_what_is_read_late_is_of_the_hyperparameters_at_the_call(make, candidate):
    def read(late):
        with torch.no_grad():
            model = make()
            x, *task = several_at(getattr(model, "kind", ""), 600)
            one, other = (model(x.to(model.train_targets), *task) for _ in range(2))
            change(model, 0.7 if late else 0.0)
            return one.mean, one.variance, other.covariance_matrix

    expected = read(False)
    with ours(candidate):
        assert_close(read(True), expected)


def step(model):
    optimiser = torch.optim.Adam(model.parameters(), lr=0.3)
    model(points(3, seed=9)).mean.sum().backward()
    optimiser.step()


CHANGES = {
    "parameters": change,
    "inputs": lambda model: model.train_inputs[0].mul_(0.9),
    "targets": lambda model: model.train_targets.add_(1.0),
    "a step of an optimiser": step,
    "state": lambda model: model.load_state_dict({k: v + 0.5 for k, v in model.state_dict().items()}),
}


@pytest.mark.thin
@each_candidate
@each_way
@pytest.mark.parametrize("imagined", [False, True], ids=["model", "fantasy"])
@pytest.mark.parametrize("how", CHANGES.values(), ids=CHANGES)
def test_after_a_change_in_place_a_prediction_is_that_of_a_fresh_model(how, candidate, fast, imagined):
    with ours(candidate), settings.fast_pred_var(fast):
        model, x = regression(), points(7, seed=5)
        model(x).variance
        if imagined:
            model = model.get_fantasy_model(points(2, seed=6), values(points(2, seed=6)))
            model(x).variance
        how(model)
        twin = Regression(*model.train_inputs, model.train_targets)
        twin.load_state_dict(model.state_dict())
        for _ in range(2):
            assert_close(moments(model(x)), moments(twin(x)))


def test_an_assignment_through_data_renews_the_caches():
    with ours():
        model, x = regression(), points(7, seed=5)
        moments(model(x))
        for parameter in model.parameters():
            parameter.data.add_(0.5)
        model.covar_module.outputscale = 3.0
        assert_close(moments(model(x)), moments(refitted(model)(x)))


def test_noise_written_through_data_is_not_seen_by_fast_variances():
    """As gpytorch's own tests want it: factor and covariances are of one time all the same."""
    with ours(), settings.fast_pred_var():
        model, x = regression(), points(7, seed=5)
        before = moments(model(x))
        model.likelihood.raw_noise.data.fill_(3.0)
        assert_close(moments(model(x)), before)
        with settings.fast_pred_var(False):
            assert_close(moments(model(x)), moments(refitted(model)(x)))


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

    with watching(memory, "_stock_evaluate_kernel"), watching(PosteriorCovariance, "formed"):
        yield shapes


@pytest.mark.thin("make candidate", "fast")
@pytest.mark.parametrize(
    ("make", "candidate"),
    [
        *((regression, candidate) for candidate in ("lazy", "lazy-product", "rows")),
        (batched, "lazy"),
        (lambda: Several("kronecker"), None),
        (MODELS["linear"], None),
    ],
    ids=["lazy", "lazy-product", "rows", "batch", "tasks", "linear"],
)
@each_way
def test_the_covariance_of_all_test_points_is_not_formed_for_variances(make, candidate, fast):
    model, m = make(), 3000
    graph = torch.set_grad_enabled(candidate != "rows")  # blocks that are not kept serve no gradients
    with graph, ours(candidate), settings.fast_pred_var(fast), evaluated() as shapes:
        posterior = model(points(m, seed=5))
        for distribution in (posterior, model.likelihood(posterior)):
            distribution.mean, distribution.variance, distribution.confidence_region()
        candidate and posterior[..., 5:9].covariance_matrix
    assert shapes
    assert not [shape for shape in shapes if min(shape) >= m]


@pytest.mark.usefixtures("trusted")
@pytest.mark.thin
@each_way
@either_cache
@pytest.mark.parametrize("candidate", [None, *SMALL])
def test_a_model_is_factorised_once(fast, candidate, detached):
    real, sizes = torch.linalg.cholesky_ex, []
    counting = mock.patch("torch.linalg.cholesky_ex", lambda a, *r, **k: sizes.append(a.shape[-1]) or real(a, *r, **k))
    with ours(candidate), counting, settings.fast_pred_var(fast), settings.detach_test_caches(detached):
        model = regression(120)
        for seed in (5, 6):
            posterior = model(points(30, seed=seed))
            posterior.mean, posterior.variance
        model.get_fantasy_model(points(2, seed=7), values(points(2, seed=7)))(points(5)).variance
    assert sizes.count(120) == 1
    assert max(sizes) == 120


# --- fantasies --------------------------------------------------------------------------------------------------------


def fantasy(model, new, targets=None, **options):
    """The model after observations that are imagined."""
    new = new.to(model.train_targets)
    return model.get_fantasy_model(new, values(new) if targets is None else targets.to(new), **options)


def predicted(model):
    model(at(model, 6))
    return model


def refitted(model):
    """A model of the same data that has predicted nothing."""
    twin = copy.deepcopy(model)
    twin.train_inputs, twin.train_targets, twin.prediction_strategy = model.train_inputs, model.train_targets, None
    return twin


CASES = {
    "one": ((1,), None),
    "two": ((2,), None),
    "five": ((5,), None),
    "batch": ((4, 2), None),
    "targets": ((2,), (4, 2)),
    "batch of points and of targets": ((4, 2), (3, 4, 2)),
}


@pytest.mark.thin
@each_way
@pytest.mark.parametrize(("shape", "targets"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("graph", [False, True], ids=["values", "graph"])
@pytest.mark.parametrize("model", ["ard", "sum", "float32", "linear", "batch"])
def test_fantasies_are_stocks_and_those_of_a_refit(model, shape, targets, fast, graph):
    if model == "batch":
        shape = (*shape[:-1], 2, shape[-1])
        targets = targets and (*targets[:-1], 2, targets[-1])
    y = None if targets is None else torch.randn(targets, generator=torch.Generator().manual_seed(1))

    def read():
        imagined = fantasy(predicted(MODELS[model]()), points(*shape, seed=7), y)
        return moments(imagined(at(imagined, 6, 8))), moments(refitted(imagined)(at(imagined, 6, 8)))

    with settings.fast_pred_var(fast), torch.set_grad_enabled(graph):
        expected = read()
        with ours():
            found = read()
    assert_close(found, expected)
    assert_close(*found)


@pytest.mark.parametrize("model", ["product", "mine"])
def test_fantasies_of_other_kernels(model):
    assert_stock(lambda: moments(fantasy(predicted(MODELS[model]()), points(2, seed=7))(points(6, seed=8))))


@pytest.mark.parametrize("learnt", [False, True], ids=["fixed", "fixed and learnt"])
@pytest.mark.parametrize("options", [{"noise": torch.tensor([0.1, 0.3]).double()}, {}], ids=["noise", "none"])
@pytest.mark.parametrize("shape", [(2,), (4, 2)])
def test_fantasies_with_noise_of_their_own(shape, options, learnt):
    def read():
        model = predicted(regression(likelihood=fixed_noise(learn_additional_noise=learnt)))
        try:
            imagined = fantasy(model, points(*shape, seed=7), **options)
        except RuntimeError as error:
            return str(error)
        return moments(imagined(points(6, seed=8))), imagined.likelihood.noise

    assert_stock(read)


@pytest.mark.parametrize("model", ["ard", "float32", "batch"])
def test_thirty_fantasies_are_as_good_as_a_refit(model):
    with ours(), torch.no_grad():
        made = predicted(MODELS[model]())
        for seed in range(30):
            made = fantasy(made, points(*made.train_inputs[0].shape[:-2], 1 + seed % 2, seed=100 + seed))
        assert_close(moments(made(at(made, 6, 8))), moments(refitted(made)(at(made, 6, 8))))
    assert made.train_targets.shape[-1] == MODELS[model]().train_targets.shape[-1] + 45
    assert "stock" not in dispatch.stats()["fantasy"]


@pytest.mark.usefixtures("trusted")
def test_fantasies_of_large_models_are_exact_and_take_no_qr():
    model, x = regression(850), points(12, seed=8)
    with ours(), torch.no_grad(), mock.patch("torch.linalg.qr", side_effect=AssertionError("QR")):
        imagined = fantasy(fantasy(predicted(model), points(2, seed=7)), points(1, seed=9))
        posterior = imagined(x)
        found = [posterior.mean, posterior.variance, posterior.covariance_matrix]
    mean, covariance = truth(refitted(imagined), x)
    assert_close(found, [mean, covariance.diagonal(), covariance], rtol=0, atol=1e-6)


@pytest.mark.thin
@each_way
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("model", ["ard", "batch", "float32"])
@pytest.mark.parametrize("made", ["attached", "detached"])
def test_gradients_by_imagined_points_and_targets(model, depth, fast, made):
    """Read with attached caches; stock's root of the inverse is detached for good where it was made so."""
    if made == "detached" and fast:
        pytest.skip("stock loses gradients here")

    def read():
        base, leaves = MODELS[model](), []
        with settings.fast_pred_var(fast), settings.detach_test_caches(made == "detached"):
            imagined = predicted(base)
            for seed in range(depth):
                new = at(base, 2, 7 + seed).expand(*base.train_inputs[0].shape[:-2], 2, 3).clone().requires_grad_()
                y = values(new.detach()).requires_grad_()
                imagined, leaves = fantasy(predicted(imagined), new, y), [*leaves, new, y]
        with settings.fast_pred_var(fast), settings.detach_test_caches(False):
            posterior = imagined(at(base, 6, 9))
            readings = [posterior.mean.sum(), posterior.variance.sum(), posterior.covariance_matrix.square().sum()]
            options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            return [torch.autograd.grad(reading, leaves, **options) for reading in readings]

    assert_stock(read, **({"rtol": 2e-2, "atol": 2e-3} if model == "float32" else {"rtol": 1e-6}))


def grid():
    x = points(40)[:, :1]
    kernel = kernels.GridInterpolationKernel(RBFKernel(), grid_size=40, num_dims=1, grid_bounds=[(-0.1, 1.1)])
    return Regression(x, x.sum(-1).sin(), kernel)


STRUCTURED = {
    "grid": grid,
    "linear": lambda: regression(kernel=kernels.LinearKernel()),
    **{kind: functools.partial(Several, kind) for kind in KINDS},
}


@each_way
@pytest.mark.filterwarnings("ignore")  # of stock's grids
@pytest.mark.parametrize("make", STRUCTURED.values(), ids=STRUCTURED)
def test_fantasies_of_structured_models_stay_stock(make, fast):
    def where(model, m, seed):
        x, *task = several_at(getattr(model, "kind", ""), m, seed)
        return [x[:, : model.train_inputs[0].shape[-1]], *task]

    def read():
        torch.manual_seed(0)
        model = make()
        model(*where(model, 6, 5))
        y = torch.arange(1.0, 1 + 2 * model.train_targets[0].numel()).double().view(2, *model.train_targets.shape[1:])
        try:
            return moments(model.get_fantasy_model(where(model, 2, 7), y)(*where(model, 6, 8)))
        except RuntimeError as error:  # of several tasks at each point: stock cannot
            return str(error)

    with settings.fast_pred_var(fast), torch.no_grad():
        assert_stock(read)
    assert "rows" not in dispatch.stats().get("fantasy", {})


def test_a_fantasy_keeps_the_hyperparameters_that_its_parent_had():
    with ours(), torch.no_grad():
        parent = predicted(regression())
        imagined = fantasy(parent, points(2, seed=7))
        expected = moments(refitted(imagined)(points(6, seed=8)))
        change(parent)
        predicted(parent)
        assert_close(moments(imagined(points(6, seed=8))), expected)
