"""hooks/: what is put in comes out again; in between, the libraries give numbers, warnings and errors of stock."""

import sys
import threading
from unittest import mock

import gpytorch
import pytest
import torch
from linear_operator import settings as library
from linear_operator.operators import DenseLinearOperator, LinearOperator
from linear_operator.utils.cholesky import psd_safe_cholesky
from support.models import definite
from support.outcomes import assert_close, outcome
from support.programs import python
from support.threads import in_threads
from support.tiling import random

import autokern
from autokern.core.errors import SettingsError
from autokern.core.registry import get
from autokern.hooks import install
from autokern.system import host

pytestmark = pytest.mark.usefixtures("one_thread")

CHOLESKY = sys.modules["linear_operator.utils.cholesky"]
QR = sys.modules["linear_operator.utils.qr"]


def installed() -> dict[tuple[object, str], object]:
    """What stands at every place that is patched, or could be."""
    return {(p.owner, p.name): vars(p.owner).get(p.name) for p in PATCHES}


PATCHES = install.patches()
ORIGINALS = installed()


@pytest.fixture(autouse=True)
def _all_stock():
    assert installed() == ORIGINALS
    yield
    while install.is_enabled():
        install.disable()
    left = [name for (owner, name), value in installed().items() if value is not ORIGINALS[owner, name]]
    for (owner, name), original in ORIGINALS.items():
        setattr(owner, name, original)
    assert left == []


@pytest.fixture
def accelerator(monkeypatch):
    """The CPU plays the accelerator, so that detours really run."""
    monkeypatch.setattr(host, "accelerator", lambda: torch.device("cpu"))


def each_candidate(op: str):
    return pytest.mark.parametrize("name", get(op).names())


def test_enable_puts_in_what_looks_like_what_it_wraps_and_disable_takes_it_out():
    autokern.enable()
    for patch in PATCHES:
        original = ORIGINALS[patch.owner, patch.name]
        assert vars(patch.owner)[patch.name] is patch.replacement
        assert isinstance(original, property) or patch.replacement.__name__ == patch.name
        assert patch.replacement.__wrapped__ is original
    assert len(PATCHES) >= 10
    autokern.disable()
    assert installed() == ORIGINALS


def test_enabling_is_counted():
    on, off = autokern.enable, autokern.disable
    for switch, depth in ((on, 1), (on, 2), (off, 1), (off, 0), (off, 0), (off, 0), (on, 1), (off, 0)):
        switch()
        assert install.is_enabled() is (depth > 0)
    with pytest.raises(ZeroDivisionError), autokern.enabled():
        raise ZeroDivisionError
    assert not install.is_enabled()


def test_many_threads():
    barrier = threading.Barrier(16)
    a = torch.eye(3, dtype=torch.float64)

    def work(_: int) -> None:
        barrier.wait()
        for _ in range(25):
            with autokern.enabled(), autokern.enabled():
                assert psd_safe_cholesky(a).equal(a)
            psd_safe_cholesky(a)

    in_threads(work, range(16))
    assert not install.is_enabled()


@pytest.mark.parametrize(
    ("name", "text"), [("AUTOKERN_BUDGET", "soon"), ("AUTOKERN_SPEED", "1"), ("AUTOKERN_FORCE", "qr=nonsense")]
)
def test_a_bad_environment_changes_nothing(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    for _ in range(2):
        with pytest.raises(SettingsError):
            autokern.enable()
        assert installed() == ORIGINALS
    monkeypatch.delenv(name)
    autokern.enable()
    autokern.disable()
    assert not install.is_enabled()


def test_hooks_that_fail_to_go_in_leave_nothing_behind():
    with mock.patch.object(install.memory, "recycle", side_effect=RuntimeError("no")), pytest.raises(RuntimeError):
        autokern.enable()
    assert installed() == ORIGINALS
    assert not install.is_enabled()
    autokern.disable()
    with autokern.enabled():
        assert install.is_enabled()


def test_a_mock_that_came_later_survives():
    autokern.enable()
    with mock.patch.object(LinearOperator, "inv_quad_logdet", autospec=True) as mocked:
        autokern.disable()
        assert vars(LinearOperator)["inv_quad_logdet"] is mocked
    # the mock put our wrapper back, which does as stock does while autokern is off, and goes with the next disable
    DenseLinearOperator(torch.eye(20)).inv_quad_logdet(torch.randn(20, 3), logdet=True)
    assert autokern.stats() == {}
    autokern.enable()
    autokern.disable()
    assert vars(LinearOperator)["inv_quad_logdet"] is ORIGINALS[LinearOperator, "inv_quad_logdet"]


def test_a_mock_within_a_block_ends_before_it():
    with autokern.enabled():
        with mock.patch.object(CHOLESKY, "_psd_safe_cholesky", wraps=CHOLESKY._psd_safe_cholesky) as mocked:
            psd_safe_cholesky(torch.eye(3))
        assert mocked.call_count == 1
        psd_safe_cholesky(torch.eye(3))
    assert autokern.stats()["cholesky"]["stock"] == 2


def test_a_wrapper_that_somebody_kept_is_stock_once_disabled():
    with autokern.enabled():
        cholesky, qr = CHOLESKY._psd_safe_cholesky, QR.stable_qr
    a = torch.eye(9) + 0.1
    assert cholesky(a).equal(ORIGINALS[CHOLESKY, "_psd_safe_cholesky"](a))
    qr(a)
    gpytorch.kernels.RBFKernel().forward(a, a)
    assert autokern.stats() == {}


@pytest.mark.usefixtures("trusted")
def test_cholesky_ex_is_called_once_by_name():
    """GPyTorch's own tests count the calls."""
    for name in get("cholesky").names():
        with autokern.enabled(), autokern.using(force={"cholesky": name}):
            for a in (torch.eye(3), torch.eye(3).expand(4, 3, 3)):
                with mock.patch("torch.linalg.cholesky_ex", wraps=torch.linalg.cholesky_ex) as counted:
                    psd_safe_cholesky(a)
                assert counted.call_count == 1, name


USE = """
import warnings; warnings.simplefilter("{warned}"); warnings.filterwarnings("ignore", "`torch.jit.script`")
{imports}
import autokern, gpytorch, linear_operator, sys, torch
assert autokern.hooks.install.is_enabled()
x = torch.rand(70, 2, dtype=torch.float64)
kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
operator = kernel(x).add_jitter(1e-2)
with autokern.using(force={{"cholesky": "stock"}}):  # or so small a matrix is left to stock without a decision
    assert isinstance(torch.linalg.cholesky(operator), linear_operator.LinearOperator)
assert set(autokern.stats()) == {{"cholesky", "kernel_matrix"}}, autokern.stats()
from linear_operator.utils import stable_pinverse
if fits := "botorch" in sys.modules:
    from botorch.fit import fit_gpytorch_mll
    from botorch.optim.closures.core import ForwardBackwardClosure
    with autokern.using(force={{"objective": "arrays"}}):
        model = botorch.models.SingleTaskGP(x, x.sum(-1, keepdim=True).sin())
        fit_gpytorch_mll(gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model))
    assert autokern.stats()["objective"]["arrays"] > 3
    assert hasattr(ForwardBackwardClosure.__call__, "__wrapped__")
autokern.disable()
assert not autokern.hooks.install.is_enabled()
assert not fits or not hasattr(ForwardBackwardClosure.__call__, "__wrapped__")
print("as it should be")
"""


ORDERS = {
    "first": "import autokern.auto\nimport gpytorch",
    "last": "import linear_operator\nimport gpytorch\nimport torch\nimport autokern.auto",
    "between": "import torch\nimport linear_operator\nimport autokern.auto\nimport gpytorch",
    "between SciPy and NumPy": "import scipy\nimport autokern.auto\nimport numpy",
    "by name": "import autokern\nimport scipy.linalg\nautokern.enable()",
    "before botorch": "import autokern.auto\nimport botorch",
    "after botorch": "import botorch\nimport autokern.auto",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
def test_any_order_of_imports(name):
    if "botorch" in name:
        pytest.importorskip("botorch")
    warned = "ignore" if "botorch" in name else "error"
    run = python("-c", USE.format(imports=ORDERS[name], warned=warned))
    assert run.stdout.splitlines()[-1:] == ["as it should be"], run.stderr


def spoilt(a: torch.Tensor, index, value: float | torch.Tensor) -> torch.Tensor:
    a = a.clone()
    a[index] = value
    return a


MATRICES = {
    "definite": definite(12),
    "float32": definite(12, dtype=torch.float32),
    "batch": definite(3, 8),
    "large": definite(1000),
    "large and of single precision": definite(1000, dtype=torch.float32),
    "large and transposed": torch.cat([definite(1000)] * 2).mT[:, 1000:],
    "a part of a larger one": torch.cat([definite(1000)] * 2, 1)[:, 1000:],
    "large and singular": torch.ones(1000, 1000, dtype=torch.float64),
    "large with nan": spoilt(definite(1000), (3, 3), float("nan")),
    "singular": torch.ones(6, 6, dtype=torch.float64),
    "nearly singular": torch.ones(6, 6, dtype=torch.float64) + 1e-13 * torch.eye(6, dtype=torch.float64),
    "one of a batch singular": torch.stack((definite(5), torch.ones(5, 5, dtype=torch.float64), definite(5, seed=1))),
    "indefinite": torch.diag(torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)),
    "one of a batch indefinite": torch.stack((definite(3), -definite(3))),
    "nan": spoilt(definite(5), (3, 3), float("nan")),
    "nan in a batch": spoilt(definite(3, 5), (1, 2, 2), float("nan")),
    "infinite": spoilt(definite(5), (2, 2), float("inf")),
    "zero": torch.zeros(4, 4, dtype=torch.float64),
    "empty": torch.zeros(0, 0, dtype=torch.float64),
    "empty batch": torch.zeros(0, 3, 3, dtype=torch.float64),
}


@pytest.mark.thin
@each_candidate("cholesky")
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize(
    "options", [{}, {"upper": True}, {"jitter": 1e-3, "max_tries": 2}], ids=["", "upper", "jitter"]
)
def test_cholesky_as_stock(name, kind, options, accelerator):
    a, before = MATRICES[kind], MATRICES[kind].clone()
    expected, warned = outcome(lambda: psd_safe_cholesky(a, **options))
    with autokern.enabled(), autokern.using(force={"cholesky": name}):
        found, told = outcome(lambda: psd_safe_cholesky(a, **options))
    assert told == warned
    assert_close(a, before, rtol=0, atol=0)
    assert_close(found, expected, rtol=1e-5 if a.dtype is torch.float32 else 1e-12, atol=1e-16)
    if isinstance(found, torch.Tensor) and name == "stock" and a.shape[-1] > 1:
        assert found.stride()[-2:] == expected.stride()[-2:]


def test_verbose_and_trace_mode_are_left_to_the_library():
    a = definite(4)
    with autokern.enabled():
        with library.verbose_linalg(True):
            psd_safe_cholesky(a)
        with library.trace_mode(True):
            psd_safe_cholesky(a)
    assert autokern.stats() == {}


def roots():
    lower, twins = torch.linalg.cholesky(definite(30)), random(30, 6)
    dense_rows = lower.clone()
    dense_rows[-2:, -2:] = dense_rows[-2:, -2:] @ torch.tensor([[0.8, 0.6], [-0.6, 0.8]], dtype=torch.float64)
    return {
        "tall": random(40, 6),
        "lower": lower,
        "dense rows": dense_rows,
        "diagonal": torch.diag(random(9)),
        "tiny diagonal": spoilt(lower, (7, 7), 1e-9),
        "zero column": spoilt(lower, (slice(None), 3), 0.0),
        "twin columns": spoilt(twins, (slice(None), 5), twins[:, 0]),
        "zero": torch.zeros(8, 3, dtype=torch.float64),
        "nearly singular lower": torch.diag(torch.logspace(0, -5.9, 12, dtype=torch.float64)),
        "beyond singular lower": torch.diag(torch.logspace(0, -6.1, 12, dtype=torch.float64)),
    }


ROOTS = roots()


@each_candidate("qr")
@pytest.mark.parametrize("kind", ROOTS)
def test_qr_as_stock(name, kind, accelerator):
    a = ROOTS[kind]
    q, r = QR.stable_qr(a)
    with autokern.enabled(), autokern.using(force={"qr": name}):
        own_q, own_r = QR.stable_qr(a)
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) * own_r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(r.dtype)
    tolerance = 1e-4 if a.dtype is torch.float32 else 1e-8
    torch.testing.assert_close(own_r * signs.unsqueeze(-1), r, rtol=0, atol=tolerance)
    torch.testing.assert_close(own_q * signs.unsqueeze(-2), q, rtol=0, atol=tolerance)
    assert own_r.diagonal(dim1=-2, dim2=-1).abs().min() >= 1e-6 * (1 - 1e-6)


def test_a_threshold_that_the_user_changed_is_obeyed():
    a = ROOTS["tall"]
    with autokern.enabled(), autokern.using(force={"qr": "choleskyqr2"}):
        with library.stable_qr_cpu_threshold(64):
            QR.stable_qr(a)
        assert autokern.stats() == {}
        QR.stable_qr(a)
        sys.modules["linear_operator.utils.pinverse"].stable_pinverse(a)
        assert autokern.stats() == {"qr": {"choleskyqr2": 2}}
