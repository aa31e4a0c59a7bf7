"""Every setting of the libraries: its row in the promises, and that an order has the effect that it has in stock."""

import contextlib
import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path

import botorch
import botorch.models
import botorch.settings
import gpytorch
import gpytorch.kernels.keops
import linear_operator
import pytest
import torch
from gpytorch import beta_features
from linear_operator import settings as library
from linear_operator.operators import AddedDiagLinearOperator, ConstantDiagLinearOperator, DenseLinearOperator
from support.losses import batch, sparse
from support.models import points, rough
from support.outcomes import as_stock, assert_close, both
from support.programs import QUIET, python

import autokern

sys.path.insert(0, str(Path(__file__).parents[1] / "differential"))

import scenarios  # noqa: F401
import ways
from compare import differences, references
from table import TABLE, Scenario

from autokern.core.errors import SettingsError
from autokern.core.problem import Problem
from autokern.core.registry import registered
from autokern.model import libraries
from autokern.ops._candidates import own_obeys

N = 300
settings = gpytorch.settings


def training(model):
    """Return value and gradients of a step."""
    model.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    loss = -mll(model(*model.train_inputs), model.train_targets)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def predictions(model):
    """Return mean and variances without the kept root, and with it."""
    found = []
    for fast in (False, True):
        with torch.no_grad(), settings.fast_pred_var(fast):
            posterior = rough(len(model.train_targets)).eval()(points(7, seed=1))
            found += [posterior.mean, posterior.variance]
    return found


def solutions(model):
    """Return a solution with a covariance, and its gradient."""
    k = model.covar_module(model.train_inputs[0]).to_dense().detach().requires_grad_()
    operator = AddedDiagLinearOperator(
        DenseLinearOperator(k), ConstantDiagLinearOperator(k.new_full((1,), 1e-2), len(k))
    )
    found = operator.solve(model.train_targets.unsqueeze(-1))
    return [found.detach(), *torch.autograd.grad(found.square().sum(), k)]


def samples(model):
    """Return samples of the prior, and of the posterior."""
    model.eval()
    with torch.no_grad(), settings.fast_pred_var():
        prior = gpytorch.distributions.MultivariateNormal(
            torch.zeros(N).double(), model.covar_module(model.train_inputs[0])
        )
        return [prior.rsample(torch.Size([3])), model(points(7, seed=1)).rsample(torch.Size([3]))]


def counted(monkeypatch):
    """The columns in each product of the library's conjugate gradients from now on."""
    products, stock = [], linear_operator.utils.linear_cg

    def linear_cg(closure, rhs, *args, **kwargs):
        multiply = closure.matmul if torch.is_tensor(closure) else closure
        return stock(lambda v: products.append(v.shape[-1]) or multiply(v), rhs, *args, **kwargs)

    monkeypatch.setattr(linear_operator.utils, "linear_cg", linear_cg)
    return products


def by_both(read, order, monkeypatch, n=N, bound=1e-5):
    """Assert that both find the same by the same products; return the columns of these, and the random numbers."""

    def run():
        with contextlib.ExitStack() as stack, monkeypatch.context() as patch:
            products = counted(patch)
            order(stack)
            torch.manual_seed(0)
            return [t.detach() for t in read(rough(n))], products, torch.rand(1)

    (expected, products, drawn), (found, own, random) = both(run)
    assert own == products
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound * float(other.abs().max()))
    return own, random, drawn


def entered(*contexts):
    """Return an order by context managers; iterating is ordered too, so that few points suffice."""

    def order(stack):
        stack.enter_context(library.max_cholesky_size(1))
        for kind, value in contexts:
            stack.enter_context(kind(value))

    return order


ORDERS = {
    "max_cholesky_size": [],
    "cg_tolerance": [(library.cg_tolerance, 5)],
    "eval_cg_tolerance": [(settings.eval_cg_tolerance, 0.5)],
    "max_cg_iterations": [(library.max_cg_iterations, 21), (library.cg_tolerance, 1e-8)],
    "terminate_cg_by_size": [(library.terminate_cg_by_size, True)],
    "max_preconditioner_size": [(library.max_preconditioner_size, 4), (library.min_preconditioning_size, 10)],
    "min_preconditioning_size": [(library.min_preconditioning_size, 10)],
    "preconditioner_tolerance": [(library.preconditioner_tolerance, 0.5), (library.min_preconditioning_size, 10)],
    "num_trace_samples": [(library.num_trace_samples, 1)],
    "max_lanczos_quadrature_iterations": [(library.max_lanczos_quadrature_iterations, 2)],
    "deterministic_probes": [(library.deterministic_probes, True)],
    "skip_logdet_forward": [(library.skip_logdet_forward, True)],
    "max_root_decomposition_size": [(library.max_root_decomposition_size, 5)],
    "tridiagonal_jitter": [(library.tridiagonal_jitter, 1e-2)],
}
READ = {"training": training, "predictions": predictions, "solutions": solutions, "samples": samples}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", READ)
@pytest.mark.parametrize("name", ORDERS)
def test_an_order_has_the_effect_that_it_has_in_stock(name, what, monkeypatch):
    """Values, gradients, products with their columns and random numbers are stock's."""
    _, random, drawn = by_both(READ[what], entered(*ORDERS[name]), monkeypatch, bound=1e-6)
    assert torch.equal(random, drawn)


@pytest.mark.filterwarnings("ignore")
def test_the_default_of_linear_operator_is_an_order_where_botorch_has_set_another(monkeypatch):
    for kind in (library._fast_log_prob, library._fast_solves, library._fast_covar_root_decomposition):
        monkeypatch.setattr(kind, "_default", False)  # as the import of BoTorch does
    monkeypatch.setattr(library.max_cholesky_size, "_global_value", 4096)

    def order(stack):
        stack.enter_context(library.fast_computations())
        stack.enter_context(library.max_cholesky_size(800))

    own, *_ = by_both(training, order, monkeypatch, 820)
    assert own


def test_a_kept_factor_does_not_serve_where_variances_are_ordered_to_be_iterated():
    def run():
        with torch.no_grad(), settings.eval_cg_tolerance(0.5), library.max_preconditioner_size(0):
            return model(points(7, seed=1)).variance

    model = rough(820).eval()
    with autokern.enabled(), torch.no_grad():
        exact = model(points(7, seed=1)).variance
        found = run()
    model = rough(820).eval()
    assert_close(found, run(), rtol=1e-6)
    assert not torch.allclose(found, exact, rtol=1e-6)


@as_stock(rtol=1e-6)
def test_variances_that_are_read_late_are_iterated_as_the_call_was_told():
    model = rough(820).eval()
    with torch.no_grad():
        with settings.eval_cg_tolerance(0.5), library.max_cg_iterations(30), settings.max_eager_kernel_size(0):
            posterior = model(points(7, seed=1))
        return posterior.variance, library.max_cg_iterations.value()


def test_explain_tells_which_settings_a_candidate_does_not_obey():
    with autokern.enabled(), library.num_trace_samples(3), library.max_preconditioner_size(0):
        training(rough(820))
        found = next(
            d for d, _ in autokern.explain().decisions if d.problem.op == "exact_log_prob" and d.problem.orders
        )
    assert found.problem.orders == {"max_preconditioner_size": 0, "num_trace_samples": 3}
    told = "it does not obey max_preconditioner_size(0), num_trace_samples(3), which you set"
    assert found.excluded["fused"] == told
    assert found.excluded["preconditioned"] == "it does not obey max_preconditioner_size(0), which you set"
    asked = autokern.explain("exact_log_prob", n=820, d=2, variant="matern52/cg/order:num_trace_samples=3")
    assert asked.excluded["fused"] == "it does not obey num_trace_samples(3), which you set"


def test_a_prediction_that_is_iterated_by_order_is_explained():
    asked = autokern.explain("predict", n=900, variant="fast/cg/order:max_root_decomposition_size=5")
    assert asked.candidate == "stock"
    assert asked.excluded["lazy"] == "it does not obey max_root_decomposition_size(5), which you set"


@pytest.mark.parametrize("word", ["order:num_trace_sample=3", "order:num_trace_samples", "order:cg_tolerance=few"])
def test_explain_knows_only_settings_that_there_are(word):
    with pytest.raises(SettingsError, match="an order is NAME=NUMBER of max_cholesky_size, "):
        autokern.explain("exact_log_prob", n=820, variant=word)


def variational(see, likelihood=gpytorch.likelihoods.BernoulliLikelihood):
    """An evidence lower bound and its gradients."""
    mll = sparse(likelihood())
    (x,), _ = batch(mll, 0)
    loss = -mll(mll.model(x), (x[:, 0] > 0.5).double())
    see("loss", loss)
    see.grads("slopes", loss, mll)


def sampled(see):
    """What likelihoods compute by samples."""
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_features=3, num_classes=2).double()
    latent = gpytorch.distributions.MultitaskMultivariateNormal(torch.zeros(4, 3).double(), torch.eye(12).double())
    variational(see, gpytorch.likelihoods.LaplaceLikelihood)
    see("classes", likelihood(latent).probs)


def keops_kernel(see):
    kernel = gpytorch.kernels.keops.MaternKernel(1.5).double()
    see("matrix", kernel(points(30)).to_dense())
    see("product", kernel(points(30)) @ points(30))


def singular(see):
    """A density whose covariance needs jitter."""
    model, x = rough(40), points(20).repeat(2, 1)
    model.set_train_data(x, model.train_targets, strict=False)
    model.likelihood.noise_covar.register_constraint("raw_noise", gpytorch.constraints.GreaterThan(0.0))
    with torch.no_grad():
        model.likelihood.noise = 1e-17
    see("step", training(model))


OWN = {of.__name__: Scenario(of.__name__, of) for of in (variational, sampled, keops_kernel, singular)}
OWN["conditioned"] = dataclasses.replace(
    TABLE["used, plain, conditioned, botorch"], may={"variance by z*": "stock's gradients are not those of the values"}
)
STEP, FIXED, POSTERIOR = "a step, scaled matern32", "a step, scaled matern52, fixed", "a posterior, scaled matern32"
DRAWN = "what is read, drawn, m 8"
ciq = library.ciq_samples
VALUES = {
    "sgpr_diagonal_correction": ("a posterior, inducing", lambda: settings.sgpr_diagonal_correction(False)),
    "variational_cholesky_jitter": ("variational", lambda: settings.variational_cholesky_jitter(1e-2, 1e-2)),
    "_linalg_dtype_cholesky": ("variational", lambda: settings.linalg_dtypes(cholesky=torch.float32)),
    "num_gauss_hermite_locs": ("variational", lambda: settings.num_gauss_hermite_locs(3)),
    "num_likelihood_samples": ("sampled", lambda: settings.num_likelihood_samples(3)),
    "min_fixed_noise": (FIXED, lambda: settings.min_fixed_noise(0.3, 0.3)),
    "use_keops": ("keops_kernel", lambda: settings.use_keops(False)),
    "propagate_grads": ("conditioned", botorch.settings.propagate_grads),
    "_fast_log_prob": ("beyond 800, scaled rbf, n 820", lambda: settings.fast_computations(log_prob=False)),
    "_fast_solves": (POSTERIOR, lambda: settings.fast_computations(solves=False)),
    "_fast_covar_root_decomposition": (
        "a posterior, scaled matern32, fast", lambda: settings.fast_computations(covar_root_decomposition=False),
    ),
    "cholesky_jitter": ("singular", lambda: library.cholesky_jitter(1e-3, 1e-3)),
    "cholesky_max_tries": ("factors, -1e-7", lambda: library.cholesky_max_tries(1)),
    "min_variance": (POSTERIOR, lambda: settings.min_variance(0.3, 0.3)),
    "observation_nan_policy": ("missing targets, mask, gaussian",),
    "ciq_samples": (DRAWN, ciq),
    "num_contour_quadrature": (DRAWN, lambda: library.num_contour_quadrature(5), ciq),
    "minres_tolerance": (DRAWN, lambda: library.minres_tolerance(0.3), ciq),
    "fast_pred_samples": (DRAWN, settings.fast_pred_samples),
    "fast_pred_var": (POSTERIOR, settings.fast_pred_var),
    "memory_efficient": (POSTERIOR, settings.memory_efficient),
    "linear_operator.memory_efficient": (POSTERIOR, library.memory_efficient),
    "lazily_evaluate_kernels": (POSTERIOR, lambda: settings.lazily_evaluate_kernels(False)),
    "detach_test_caches": (POSTERIOR, lambda: settings.detach_test_caches(False)),
    "debug": (POSTERIOR, lambda: settings.debug(False)),
    "linear_operator.debug": (POSTERIOR, lambda: library.debug(False)),
    "prior_mode": (POSTERIOR, settings.prior_mode),
    "skip_posterior_variances": (POSTERIOR, settings.skip_posterior_variances),
    "trace_mode": (POSTERIOR, settings.trace_mode),
    "linear_operator.trace_mode": (POSTERIOR, library.trace_mode),
    "max_eager_kernel_size": (POSTERIOR, lambda: settings.max_eager_kernel_size(10)),
    "fast_computations": (POSTERIOR, lambda: settings.fast_computations(False, False, False)),
    "_linalg_dtype_symeig": (POSTERIOR, lambda: settings.linalg_dtypes(torch.float32)),
    "use_toeplitz": (POSTERIOR, lambda: library.use_toeplitz(False)),
    "stable_qr_cpu_threshold": (POSTERIOR, lambda: library.stable_qr_cpu_threshold(1)),
    "checkpoint_kernel": (STEP, lambda: beta_features.checkpoint_kernel(20)),
}  # fmt: skip
"""A scenario of the differential table for each setting, and the setting."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VALUES)
def test_a_setting_of_values_holds(name):
    of, *contexts = VALUES[name]
    plain = (TABLE | OWN)[of]

    def program(see):
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            plain.program(see)

    ordered = dataclasses.replace(plain, program=program)
    known = references(ordered)
    with ways.enabled(), ways.session():
        assert not differences(ordered, known, ways.told(ordered))


PAGE = Path(__file__).parents[2] / "docs" / "promises.md"


def rows():
    """Return the table of the page: names, defaults, effects."""
    text = PAGE.read_text(encoding="utf-8").partition("## Settings of the libraries")[2].partition("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]


def classes():
    """Return the names of all settings of the libraries, with their module where two have the same name."""
    found = {}
    for module in (library, settings, botorch.settings, beta_features):
        for name, kind in vars(module).items():
            if inspect.isclass(kind) and kind.__module__ == module.__name__ and name not in _BASES:
                found.setdefault(name, []).append(module.__name__.partition(".")[0])
    return {name: modules for name, modules in found.items() if name != "_moved_beta_feature"}


LARGE = Problem(op="solve", m=5000, n=5000)
ELSEWHERE = {
    "verbose_linalg", "default_preconditioner", "linalg_dtypes", "log_level", "validate_input_scaling",
}  # fmt: skip
"""Settings with a test of their own, and those that neither library nor autokern reads in a computation."""
_BASES = {"_dtype_value_context", "_feature_flag", "_value_context", "_Flag"}


def test_each_setting_has_its_row():
    listed = [name for row in rows() for name in re.findall(r"`([^`]+)`", row[0])]
    assert sorted(listed) == sorted(classes())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_says_what_the_table_of_the_package_says(row):
    """Orders, their defaults, and who obeys them; each setting is tried here."""
    listed = {each.name: each for each in libraries.ROWS}
    for name in re.findall(r"`([^`]+)`", row[0]):
        assert name in {*ORDERS, *VALUES, *ELSEWHERE}
        assert (name in listed) == row[2].startswith("an order")
        if name in listed:
            default = row[1].partition(";")[0]
            assert default == (f"{listed[name].default:g}" if type(listed[name].default) is not bool else "off")
            obeyed = any(own_obeys(name, value, LARGE) for value in (0, 1, 100, 500, 5000))
            assert ("also obeyed by `preconditioned`" in row[2]) == obeyed


def test_every_candidate_that_obeys_an_order_is_named():
    """What obeys any order is the library's own iterations; what obeys some is `preconditioned`."""
    found = {}
    for name in (*(row.name for row in libraries.ROWS), "unknown"):
        for op in registered():
            for candidate in op.candidates[1:]:
                variants = [f"rbf/cg/order:{name}={value}" for value in (0, 1, 100, 500, 5000)]
                problems = [LARGE.replace(op=op.name, d=2, rhs=1, grad="theta", variant=v) for v in variants]
                if not all("does not obey" in str(candidate.unsupported(problem)) for problem in problems):
                    found.setdefault(candidate.name, set()).add(name)
    assert set(found) == {"matrix-free", "preconditioned"}
    assert "unknown" in found["matrix-free"]
    assert "unknown" not in found["preconditioned"]


def test_the_defaults_are_those_of_the_libraries():
    program = """
import json, gpytorch, linear_operator.settings as library
from autokern.model.libraries import ROWS, SOLVES, orders
def read(): return {row.name: row.value() for row in ROWS}
def ordered():
    found = []
    for size in (800, 4096):
        with library.max_cholesky_size(size):
            found.append(orders(SOLVES))
    return found
before, told = read(), ordered()
import botorch
print(json.dumps([before, read(), told, ordered()]))
"""
    before, after, told, told_after = json.loads(python(*QUIET, "-c", program, check=True).stdout.splitlines()[-1])
    assert told == ["", "/order:max_cholesky_size=4096"]
    assert told_after == ["/order:max_cholesky_size=800", ""]
    assert before == {row.name: row.default for row in libraries.ROWS}
    assert {name for name in before if before[name] != after[name]} == {"max_cholesky_size"}
    assert after["max_cholesky_size"] == libraries.DEFAULT_SIZES[1]
