"""The public surface: names, docstrings, covariances and linear algebra for direct use."""

import contextlib
import doctest
import importlib
import inspect
import operator
import pkgutil

import gpytorch
import pytest
import torch
from gpytorch.kernels import AdditiveStructureKernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from linear_operator.utils.warnings import NumericalWarning
from support.models import definite
from support.tiling import random

import autokern
from autokern.core.decision import Decision
from autokern.core.errors import SettingsError
from autokern.core.problem import Problem
from autokern.core.registry import registered
from autokern.runtime import api

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = [
    "AutokernError", "AutokernWarning", "Compared", "Decision", "Explanation", "MemoryBudgetError", "Problem",
    "Profile", "ProfileError", "RanksError", "Served", "SettingsError", "Status", "calibrate", "compare", "covariance",
    "disable", "enable", "enabled", "explain", "is_enabled", "linalg", "op", "profile", "ranks", "stats", "status",
    "using",
]  # fmt: skip
WITHIN = ["covariance.matmul", "covariance.matrix", "linalg.cholesky", "linalg.inv_quad_logdet", "linalg.qr"]


def test_the_public_names_are_these():
    assert sorted(autokern.__all__) == NAMES
    assert dir(autokern) == sorted([*NAMES, "__version__"])
    assert all(hasattr(autokern, name) for name in NAMES)
    assert [f"{m}.{name}" for m in ("covariance", "linalg") for name in getattr(autokern, m).__all__] == WITHIN


def modules() -> list[str]:
    found = pkgutil.walk_packages(autokern.__path__, "autokern.")
    return [m.name for m in found if m.name not in ("autokern.auto", "autokern.__main__")]


@pytest.mark.parametrize("name", modules())
def test_a_module_has_what_it_names_and_a_docstring_whose_examples_run(name):
    module = importlib.import_module(name)
    assert all(hasattr(module, public) for public in getattr(module, "__all__", ()))
    assert (module.__doc__ or "").strip(), f"{name} has no docstring"
    failed, _ = doctest.testmod(module, extraglobs={"autokern": autokern, "torch": torch, "gpytorch": gpytorch})
    assert failed == 0


@pytest.mark.parametrize("name", [*NAMES, *WITHIN])
def test_everything_public_is_documented(name):
    thing = operator.attrgetter(name)(autokern)
    text = inspect.getdoc(thing)
    assert text
    if inspect.isfunction(thing):
        assert ">>>" in text, "tests of docstrings run the example"
        assert "Parameters" in text or not inspect.signature(thing).parameters


def test_a_problem_is_completed():
    assert api.problem("qr", m=500, n=50) == Problem(op="qr", m=500, n=50)
    assert api.problem("cholesky", n=70) == Problem(op="cholesky", m=70, n=70)
    assert api.problem("cholesky", m=70).n == 70
    given = api.problem("qr", m=5, n=5, dtype=torch.float32, device=torch.device("cuda:1"), grad="a", batch=3)
    assert given == Problem(op="qr", m=5, n=5, dtype="float32", device="cuda", grad="a", batch=3)
    assert api.problem("qr", n=5, dtype=None).dtype == "float64"


@pytest.mark.parametrize("op", registered(), ids=lambda op: op.name)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_op_is_explained(op, device):
    found = autokern.explain(op.name, n=300, device=device)
    assert isinstance(found, Decision)
    if found.source != "other hosts":
        assert found.candidate == op.default_candidate(found.problem)
    assert found.source in ("unmeasured", "only choice", "other hosts")
    assert str(found).startswith(f"{op.name}(m=300, n=300")


x1 = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
x2 = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

x3, line = torch.stack((x2, x2 + 1)), torch.linspace(0, 1, 6, dtype=torch.float64)
POINTS = [(x1, None), (x1, x2), (x1, x3), (x3, x1)]
LINES = [(line, None), (line, line[:2])]
KERNELS = {
    "rbf": RBFKernel,
    "scaled": lambda: ScaleKernel(MaternKernel(1.5, ard_num_dims=3)),
    "active dims": lambda: RBFKernel(active_dims=(0, 2), ard_num_dims=2),
    "scaled active dims": lambda: ScaleKernel(RBFKernel(active_dims=(1,))),
    "batch": lambda: ScaleKernel(RBFKernel(batch_shape=torch.Size([2])), batch_shape=torch.Size([2])),
    "linear": LinearKernel,
    "product": lambda: RBFKernel() * LinearKernel(),
    "subclass": type("Mine", (RBFKernel,), {}),
    "sum": lambda: RBFKernel() + ScaleKernel(MaternKernel(2.5)),
    "additive": lambda: AdditiveStructureKernel(RBFKernel(), 3),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of last_dim_is_batch
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("enabled", [False, True])
def test_covariance_matrices_and_products(kind, enabled):
    kernel = KERNELS[kind]().double()
    for first, second in POINTS[: 2 if kind == "batch" else 4] + (LINES if kind in ("rbf", "linear") else []):
        expected = kernel(first, second).to_dense()
        for forced in ("stock", "gemm"):
            hooks = autokern.enabled() if enabled else contextlib.nullcontext()
            with autokern.using(force={"kernel_matrix": forced}), hooks:
                found = autokern.covariance.matrix(kernel, first, second)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        rhs = random(expected.shape[-1], 2)
        for columns in (rhs, rhs[:, 0]) if first.dim() == 1 else (rhs,):
            found = autokern.covariance.matmul(kernel, first, second, columns)
            torch.testing.assert_close(found, expected @ columns, rtol=1e-9, atol=1e-9)


QR = [
    ({"size": 4}, "no 'size'"),
    ({"n": -1}, "n=-1"),
    ({"m": 2.5}, "m=2.5"),
    ({"m": True}, "m=True"),
    ({"variant": 5}, "variant=5"),
    ({"n": "many"}, "n='many'"),
    ({"dtype": torch.int64}, "int64"),
]
DENSITY = [
    ({"variant": "nonsense"}, "variant 'nonsense' was asked for; exact_log_prob knows"),
    ({"variant": "matern52"}, "variant 'matern52' .*, matern52/cholesky"),
    *(
        ({"variant": f"order:{word}"}, "an order is NAME=NUMBER of max_cholesky_size, ")
        for word in ("num_trace_sample=3", "num_trace_samples", "cg_tolerance=few")
    ),
]
REFUSED = [
    *((lambda fields=fields: autokern.explain("qr", **fields), told) for fields, told in QR),
    *((lambda fields=fields: autokern.explain("exact_log_prob", n=100, **fields), told) for fields, told in DENSITY),
    (lambda: autokern.calibrate("qr", level="lazy", budget=0.1, progress=False), "lazy"),
    (lambda: autokern.calibrate("qr", accuracy="better"), "accuracy"),
    (lambda: autokern.covariance.matrix(RBFKernel(), x1, x2[:, :2]), "3 and 2 input dimensions"),
    *(
        (lambda d=d: autokern.covariance.matrix(ScaleKernel(RBFKernel(ard_num_dims=4)), x1[:, :d]), "4 lengthscales")
        for d in (1, 2, 3)
    ),
]


@pytest.mark.parametrize(("call", "told"), REFUSED)
def test_what_never_occurs_is_refused(call, told):
    """What the command line may ask for is refused in its words, in `console.txt`."""
    with pytest.raises(SettingsError, match=told):
        call()


@pytest.fixture(params=[(), (3,), (2, 1)], ids=str)
def spd(request):
    return definite(*request.param, 20)


ON_MODELS = {"objective", "kernel_matrix", "kernel_matmul", "exact_log_prob", "dense_log_prob", "task_log_prob"}
ON_MODELS |= {"predict", "posterior", "fantasy", "solve", "variational"}


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_linear_algebra(spd, seed):
    rhs = torch.randn(*spd.shape[:-1], 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    tall = spd[..., :5]
    with autokern.using(force=None if seed is None else f"random:{seed}"):
        q, r = autokern.linalg.qr(tall)
        torch.testing.assert_close(q @ r, tall)
        torch.testing.assert_close(q.mT @ q, torch.eye(5, dtype=torch.float64).expand(*spd.shape[:-2], 5, 5))
        lower = autokern.linalg.cholesky(spd)
        torch.testing.assert_close(lower, torch.linalg.cholesky(spd))
        inv_quad, logdet = autokern.linalg.inv_quad_logdet(spd, rhs)
        torch.testing.assert_close(inv_quad, (rhs * torch.linalg.solve(spd, rhs)).sum((-2, -1)))
        torch.testing.assert_close(logdet, torch.logdet(spd))
    assert set(autokern.stats()) == {op.name for op in registered()} - ON_MODELS


def test_cholesky_takes_jitter():
    ones = torch.ones(4, 4, dtype=torch.float64)
    with pytest.warns(NumericalWarning, match=r"added jitter of 1\.0e-02"):
        autokern.linalg.cholesky(ones, jitter=1e-2)


@pytest.mark.parametrize(
    ("op", "fields", "variant"),
    [
        ("exact_log_prob", {"n": 1000}, "rbf/cg"),
        ("inv_quad_logdet", {"n": 300}, "cholesky"),
        ("inv_quad_logdet", {"n": 3000}, "cg"),
        ("exact_log_prob", {"n": 100}, "rbf/cholesky"),
        ("exact_log_prob", {"n": 1000, "variant": "matern52/cholesky"}, "matern52/cholesky"),
        ("exact_log_prob", {"n": 5000, "variant": "order:num_trace_samples=1"}, "rbf/cg/order:num_trace_samples=1"),
    ],
)
def test_a_variant_is_that_of_a_call_of_its_size_or_one_that_is_known(op, fields, variant):
    found = autokern.explain(op, **fields).problem
    assert (found.variant, found.m) == (variant, fields["n"])
    assert op != "exact_log_prob" or found.grad == "theta"
