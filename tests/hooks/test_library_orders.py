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
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator import settings as library
from support.losses import batch, sparse
from support.models import loss_of, points, rough, step
from support.outcomes import as_stock, assert_close
from support.programs import QUIET, python

import autokern

sys.path.insert(0, str(Path(__file__).parents[1] / "differential"))

import scenarios  # noqa: F401
import ways
from compare import differences, references
from table import TABLE, Scenario

from autokern.core.problem import Problem
from autokern.core.registry import registered
from autokern.model import libraries
from autokern.ops._candidates import own_obeys

settings = gpytorch.settings


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


def density(see, model=None):
    model = model or rough(820)
    loss = loss_of(ExactMarginalLogLikelihood(model.likelihood, model.train()))
    see("loss", loss)
    see.grads("slopes", loss, model)


def singular(see):
    """A density whose covariance needs jitter."""
    model, x = rough(40), points(20).repeat(2, 1)
    model.set_train_data(x, model.train_targets, strict=False)
    model.likelihood.noise_covar.register_constraint("raw_noise", gpytorch.constraints.GreaterThan(0.0))
    with torch.no_grad():
        model.likelihood.noise = 1e-17
    density(see, model)


OWN = {of.__name__: Scenario(of.__name__, of) for of in (variational, sampled, keops_kernel, density, singular)}
OWN["conditioned"] = dataclasses.replace(
    TABLE["used, usual, conditioned, botorch"], may={"variance by z*": "stock's gradients are not those of the values"}
)
STEP, FIXED, POSTERIOR = "a step, scaled matern32", "a step, scaled matern52, fixed", "a posterior, scaled matern32"
DRAWN = "what is read, drawn, m 8"
PRECONDITIONED = lambda: library.min_preconditioning_size(10)  # noqa: E731
ORDERS = {
    "max_cholesky_size": [],
    "cg_tolerance": [lambda: library.cg_tolerance(5)],
    "eval_cg_tolerance": [lambda: settings.eval_cg_tolerance(0.5)],
    "max_cg_iterations": [lambda: library.max_cg_iterations(21), lambda: library.cg_tolerance(1e-8)],
    "terminate_cg_by_size": [lambda: library.terminate_cg_by_size(True)],
    "max_preconditioner_size": [lambda: library.max_preconditioner_size(4), PRECONDITIONED],
    "min_preconditioning_size": [PRECONDITIONED],
    "preconditioner_tolerance": [lambda: library.preconditioner_tolerance(0.5), PRECONDITIONED],
    "num_trace_samples": [lambda: library.num_trace_samples(1)],
    "max_lanczos_quadrature_iterations": [lambda: library.max_lanczos_quadrature_iterations(2)],
    "deterministic_probes": [lambda: library.deterministic_probes(True)],
    "skip_logdet_forward": [lambda: library.skip_logdet_forward(True)],
    "max_root_decomposition_size": [lambda: library.max_root_decomposition_size(5)],
    "tridiagonal_jitter": [lambda: library.tridiagonal_jitter(1e-2)],
}
ITERATED = {
    "training": "a step, scaled matern52, n 130",
    "predictions": "a posterior, n 130, m 70",
    "roots": "a posterior, scaled matern32, fast",
    "solutions": "operated, plus a constant",
    "samples": "what is read, drawn, m 8",
}
VALUES = {
    "sgpr_diagonal_correction": ("a posterior, inducing", lambda: settings.sgpr_diagonal_correction(False)),
    "variational_cholesky_jitter": ("variational", lambda: settings.variational_cholesky_jitter(1e-2, 1e-2)),
    "_linalg_dtype_cholesky": ("variational", lambda: settings.linalg_dtypes(cholesky=torch.float32)),
    "num_gauss_hermite_locs": ("variational", lambda: settings.num_gauss_hermite_locs(3)),
    "num_likelihood_samples": ("sampled", lambda: settings.num_likelihood_samples(3)),
    "min_fixed_noise": (FIXED, lambda: settings.min_fixed_noise(0.3, 0.3)),
    "use_keops": ("keops_kernel", lambda: settings.use_keops(False)),
    "propagate_grads": ("conditioned", botorch.settings.propagate_grads),
    "_fast_log_prob": ("density", lambda: settings.fast_computations(log_prob=False)),
    "_fast_solves": (POSTERIOR, lambda: settings.fast_computations(solves=False)),
    "_fast_covar_root_decomposition": (
        "a posterior, scaled matern32, fast", lambda: settings.fast_computations(covar_root_decomposition=False),
    ),
    "cholesky_jitter": ("singular", lambda: library.cholesky_jitter(1e-3, 1e-3)),
    "cholesky_max_tries": ("not positive definite, indefinite, defaults", lambda: library.cholesky_max_tries(1)),
    "min_variance": (POSTERIOR, lambda: settings.min_variance(0.3, 0.3)),
    "observation_nan_policy": ("missing targets, mask, gaussian",),
    "ciq_samples": (DRAWN, library.ciq_samples),
    "num_contour_quadrature": (DRAWN, lambda: library.num_contour_quadrature(5), library.ciq_samples),
    "minres_tolerance": (DRAWN, lambda: library.minres_tolerance(0.3), library.ciq_samples),
    "fast_pred_samples": (DRAWN, settings.fast_pred_samples),
    "linear_operator.memory_efficient": (POSTERIOR, library.memory_efficient),
    "linear_operator.debug": (POSTERIOR, lambda: library.debug(False)),
    "linear_operator.trace_mode": (POSTERIOR, library.trace_mode),
    "_linalg_dtype_symeig": (POSTERIOR, lambda: settings.linalg_dtypes(torch.float32)),
    "use_toeplitz": (POSTERIOR, lambda: library.use_toeplitz(False)),
    "stable_qr_cpu_threshold": (POSTERIOR, lambda: library.stable_qr_cpu_threshold(1)),
    "checkpoint_kernel": (STEP, lambda: beta_features.checkpoint_kernel(20)),
}  # fmt: skip
"""A scenario of the differential table for each setting, and the setting."""


def ordered(of, *contexts):
    """A scenario under some settings, which tells the columns of each product of conjugate gradients as well."""
    plain, stock = (TABLE | OWN)[of], linear_operator.utils.linear_cg

    def program(see):
        products = []

        def linear_cg(closure, rhs, *args, **kwargs):
            multiply = closure.matmul if torch.is_tensor(closure) else closure
            return stock(lambda v: products.append(v.shape[-1]) or multiply(v), rhs, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
            patch.setattr(linear_operator.utils, "linear_cg", linear_cg)
            for context in contexts:
                stack.enter_context(context())
            plain.program(see)
        see("products", str(products))

    return dataclasses.replace(plain, program=program)


def agrees(scenario):
    """Assert that a scenario differs in nothing from stock, and return what stock told."""
    known = references(scenario)
    with ways.enabled(), ways.session():
        assert not differences(scenario, known, ways.told(scenario))
    return known[0].stock.facts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ITERATED)
@pytest.mark.parametrize("name", ORDERS)
def test_an_order_has_the_effect_that_it_has_in_stock(name, what):
    """Iterating is ordered too, so that few points suffice."""
    agrees(ordered(ITERATED[what], lambda: library.max_cholesky_size(1), *ORDERS[name]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VALUES)
def test_a_setting_of_values_holds(name):
    agrees(ordered(*VALUES[name]))


@pytest.mark.filterwarnings("ignore")
def test_the_default_of_linear_operator_is_an_order_where_botorch_has_set_another():
    of = ordered("density", library.fast_computations, lambda: library.max_cholesky_size(800))
    assert agrees(dataclasses.replace(of, library="botorch"))["products"] != "[]"


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
        step(rough(820))
        found = next(
            d for d, _ in autokern.explain().decisions if d.problem.op == "exact_log_prob" and d.problem.orders
        )
    assert found.problem.orders == {"max_preconditioner_size": 0, "num_trace_samples": 3}
    told = "it does not obey max_preconditioner_size(0), num_trace_samples(3), which you set"
    assert found.excluded["fused"] == told
    assert found.excluded["preconditioned"] == "it does not obey max_preconditioner_size(0), which you set"
    asked = autokern.explain("exact_log_prob", n=820, d=2, variant="matern52/cg/order:num_trace_samples=3")
    assert asked.excluded["fused"] == "it does not obey num_trace_samples(3), which you set"
    asked = autokern.explain("predict", n=900, variant="fast/cg/order:max_root_decomposition_size=5")
    assert asked.candidate == "stock"
    assert asked.excluded["lazy"] == "it does not obey max_root_decomposition_size(5), which you set"


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
    "fast_pred_var", "memory_efficient", "lazily_evaluate_kernels", "detach_test_caches", "debug", "prior_mode",
    "skip_posterior_variances", "trace_mode", "max_eager_kernel_size", "fast_computations",
}  # fmt: skip
"""Settings with a test of their own, those that no computation reads, and `SETTINGS` of the differential scenarios."""
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
