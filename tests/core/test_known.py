"""Known functions of the libraries: what changes a fingerprint, what leaves a hook out, and what a program is told."""

import functools
import inspect
import re
import sys
import textwrap
from unittest import mock

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.kernels.kernel import Kernel
from linear_operator import to_linear_operator
from linear_operator.operators import DenseLinearOperator, PsdSumLinearOperator
from linear_operator.utils import cholesky as cholesky_module
from linear_operator.utils.memoize import cached
from support.programs import python

import autokern
from autokern.core.releases import known, recorded
from autokern.core.releases.known import relied
from autokern.core.releases.recorded import definitions, of_function
from autokern.model.libraries import TASKS

SOURCE = """
def half(x, scale=0.5, *, shift=0):
    'Return a half.'
    return x * scale + shift - 1.0
"""


def marks(source):
    ((_, code, syntax),) = definitions(textwrap.dedent(source), "file.py")
    return code, syntax


def alive(source):
    space = {}
    exec(textwrap.dedent(source), space)
    return space["half"]


@pytest.mark.parametrize(
    ("old", "new"),
    [("x * scale", "x / scale"), ("1.0", "1.5"), ("scale=0.5", "scale=0.25"), ("shift=0", "shift=1"), ("x,", "x, y,")],
)
def test_another_formula_constant_default_or_argument_is_another_fingerprint(old, new):
    code, syntax = marks(SOURCE)
    assert code != marks(SOURCE.replace(old, new))[0]
    assert syntax != marks(SOURCE.replace(old, new))[1]


@pytest.mark.parametrize(("old", "new"), [("a half", "the half"), ("return x", "# a comment\n    return x")])
def test_docstrings_lines_and_comments_count_nothing(old, new):
    assert marks(SOURCE) == marks(SOURCE.replace(old, new))
    assert marks(SOURCE)[1] == marks(SOURCE.replace("    'Return a half.'\n", ""))[1]


def test_a_function_has_the_fingerprint_of_its_source_without_defaults_that_only_a_run_tells():
    assert marks(SOURCE)[0] == of_function(alive(SOURCE))[0]
    code = marks("def half(x, scale=BASE):\n    return x")[0]
    assert code[0] == "~"
    assert code == of_function(alive("BASE = 3\ndef half(x, scale=BASE):\n    return x"))[1]


def test_all_that_is_installed_and_relied_on_is_known():
    known.leave_out("a hook", "which is forgotten when others are installed")
    with autokern.enabled():
        assert not known.unknown()
    for kind in (RBFKernel, ScaleKernel, gpytorch.likelihoods.GaussianLikelihood, gpytorch.priors.GammaPrior):
        assert relied(kind).holds(), relied(kind).unknown


def other(self, x1, x2, diag=False, **params):
    return torch.zeros(len(x1), len(x2))


def wrapped(function):
    @functools.wraps(function)
    def outer(*args, **kwargs):
        return function(*args, **kwargs) * 1.5

    return outer


class Scaling:
    """A user's decorator that says what it decorates."""

    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        return self.__wrapped__(*args, **kwargs) * 1.5


class Halved(property):
    def __get__(self, one, kind=None):
        return self if one is None else super().__get__(one, kind) / 2


DENSE = "linear_operator.operators.dense_linear_operator:DenseLinearOperator.to_dense"
HOLDER = sys.modules["linear_operator.operators._linear_operator"]
REPLACED = [
    *((RBFKernel, "forward", make) for make in (lambda _: other, wrapped, lambda _: mock.MagicMock())),
    *((Kernel, "__call__", make) for make in (lambda _: other, wrapped, lambda _: mock.MagicMock())),
    *((Kernel, "covar_dist", make) for make in (lambda _: other, wrapped, lambda _: mock.MagicMock())),
    *((Kernel, "covar_dist", around) for around in (Scaling, torch.no_grad(), cached(name="mine"))),
    *((Kernel, "covar_dist", getattr(functools, name)) for name in ("lru_cache", "partial", "partialmethod")),
    (Kernel, "lengthscale", lambda stock: Halved(stock.fget, stock.fset)),
    (RBFKernel, "has_lengthscale", lambda _: False),
]
NEW = [
    (RBFKernel, "__getattribute__", lambda _: other, RBFKernel),
    (RBFKernel, "raw_lengthscale", lambda _: property(other), RBFKernel),  # a parameter of each instance
    (RBFKernel, "covar_dist", lambda _: other, RBFKernel),  # which it inherits
    (DenseLinearOperator, "__getattribute__", lambda _: other, DENSE),
    (DenseLinearOperator, "cholesky", lambda _: other, DENSE),
    (PsdSumLinearOperator, "_matmul", lambda _: other, TASKS),  # it inherits all that it runs
]
ELSEWHERE = [
    (HOLDER, "psd_safe_cholesky", "linear_operator.operators._linear_operator:LinearOperator._cholesky"),  # by value
    (torch.linalg, "cholesky_ex", "linear_operator.utils.cholesky:_psd_safe_cholesky"),
    (torch.linalg, "qr", "linear_operator.utils.qr:stable_qr"),
    (torch, "cdist", "gpytorch.kernels.kernel:dist"),
    (torch.Tensor, "clamp_min_", "gpytorch.kernels.kernel:sq_dist"),
    (torch, "cholesky_inverse", "gpytorch.kernels.kernel:sq_dist"),  # which autokern alone calls
    (torch.linalg, "vecdot", "gpytorch.kernels.kernel:sq_dist"),
]


@pytest.mark.parametrize(
    ("owner", "name", "make", "of"),
    [*((*one, RBFKernel) for one in REPLACED), *NEW, *((place, name, wrapped, of) for place, name, of in ELSEWHERE)],
)
def test_what_is_replaced_or_stands_newly_in_front_of_others_is_seen_until_it_is_put_back(owner, name, make, of):
    rely, dense = relied(*of) if of is TASKS else relied(of), to_linear_operator(torch.eye(2))
    assert rely.holds()
    with mock.patch.object(owner, name, make(inspect.getattr_static(owner, name, None)), create=True):
        assert not rely.holds()
        assert (f"{owner.__name__}.{name}" if owner in (RBFKernel, Kernel) else name) in str(rely.unknown)
    assert rely.holds()
    assert dense.to_dense().equal(torch.eye(2))


def test_code_that_is_replaced_in_place_is_seen_beneath_a_hook_too():
    forward, rely = RBFKernel.forward, relied(RBFKernel)
    before = forward.__code__
    with autokern.enabled():
        assert rely.holds()
        forward.__code__ = other.__code__
        assert not rely.holds()
        forward.__code__ = before
        assert rely.holds()


def test_a_function_that_is_gone_or_in_a_base_class_is_missing():
    rely = relied("linear_operator.utils.cholesky:psd_safe_cholesky")
    with mock.patch.dict(vars(cholesky_module)):
        del cholesky_module.psd_safe_cholesky
        assert not rely.holds()
        assert "missing" in str(rely.unknown)
    assert rely.holds()


def test_on_a_python_that_nobody_recorded_the_syntax_decides():
    syntax = {name: mark for name, _, mark in recorded._sources(sys.modules[RBFKernel.__module__].__file__)}
    allowed = frozenset([syntax["RBFKernel.forward"]])
    assert recorded._is_marked(RBFKernel.forward, allowed)
    assert not recorded._is_marked(RBFKernel.forward, frozenset(["0" * 10]))
    assert not recorded._is_marked(other, allowed)


def program(change, **environment):
    code = f"""
    import warnings
    import gpytorch, torch
    {change}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import autokern.auto
    told = [str(one.message) for one in caught if "autokern" in str(one.category)]
    from linear_operator.utils import cholesky
    print(len(told), *told)
    print(cholesky._psd_safe_cholesky.__code__.co_filename.count("autokern/hooks"))
    """
    run = python("-c", textwrap.dedent(code), check=True, **environment)
    told, hooked = run.stdout.strip().splitlines()[-2:]
    return told, hooked == "1"


MISSING = "del gpytorch.models.ExactGP.get_fantasy_model"
TOLD = rf"1 .*gpytorch {gpytorch.__version__}.*ExactGP\.get_fantasy_model.*AUTOKERN_UNKNOWN"


@pytest.mark.parametrize(
    ("change", "order", "told", "enabled"),
    [
        (MISSING, "", TOLD, True),  # once, and it leaves the others
        (MISSING, "stock", ".*get_fantasy_model", False),
        pytest.param("", "stock", "0", True, marks=pytest.mark.slow),
        ("gpytorch.models.ExactGP.get_fantasy_model = lambda *a, **k: 1", "trust", "0", True),
        ("del gpytorch.kernels.AdditiveKernel", "", ".*autokern stays off", False),  # an import of auto never fails
    ],
)
def test_what_is_unknown_is_told_and_left_out_unless_it_is_trusted(change, order, told, enabled):
    found, hooked = program(change, AUTOKERN_UNKNOWN=order)
    assert re.match(told, found)
    assert hooked is enabled


@pytest.mark.parametrize("base", [True, False])
def test_a_function_that_a_class_has_newly_is_harmless_unless_it_overrides_a_recorded_one(base):
    rely = relied(RBFKernel)
    assert rely.holds()
    with mock.patch.object(RBFKernel, "helper", other, create=True):
        if base:
            with mock.patch.object(Kernel, "helper", other, create=True):
                assert rely.holds()
        assert rely.holds()


def test_another_constant_or_base_of_a_class_is_another_fingerprint_and_each_decorator_counts():
    def found(source):
        return {name: mark for name, mark, _ in definitions(source, "file.py")}

    then = found("class Half(Base):\n    of = 2")
    assert found("class Half(More, Base):\n    of = 2") != then
    assert found("class Half(Base):\n    of = 3") != then
    assert found("from here import Base as B\nclass Half(B):\n    of = 2") == then
    source = "@property\n@cached(name='half')\n@torch.no_grad()\ndef half(self):\n    return 1"
    assert [code for _, code, _ in definitions(source, "file.py")][1:] == ["@1", "@2"]


def test_status_lists_what_is_unknown():
    assert not autokern.status().unknown
    with mock.patch.object(Kernel, "covar_dist", other), autokern.enabled():
        found = autokern.status()
        assert found.enabled
        assert found.versions["torch"][1]
        assert "gpytorch.kernels.kernel:Kernel.covar_dist" in found.unknown
        assert "Kernel.covar_dist" in str(found)
        assert "covar_dist" in str(autokern.explain())
