"""keops_product.py: products against the dense formula, of which each compiles for seconds, and obstacles to them."""

import copy
import os
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch
from gpytorch.kernels import ConstantKernel, Kernel, MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel
from support.fakes import as_if_of_autokern
from support.programs import python

import autokern
from autokern.backends import keops_product
from autokern.core.errors import AutokernError
from autokern.kernels import tree
from autokern.kernels.matmul import matmul
from autokern.kernels.tiles import usual
from autokern.system import host

pytestmark = pytest.mark.usefixtures("one_thread")
needs_keops = pytest.mark.skipif(
    keops_product.keops_problem() is not None, reason=f"needs KeOps: {keops_product.keops_problem()}"
)

D, COLUMNS = 2, 3
PARTS = {
    "rbf": lambda: RBFKernel(ard_num_dims=D),
    "matern12": lambda: MaternKernel(0.5),
    "matern32": lambda: MaternKernel(1.5),
    "matern52": lambda: MaternKernel(2.5),
    "rq": RQKernel,
    "periodic": PeriodicKernel,
    "constant": ConstantKernel,
    "product": lambda: MaternKernel(2.5) * PeriodicKernel(),
}


def everything(dtype: torch.dtype = torch.float64) -> tuple[Kernel, list[ScaleKernel]]:
    """One kernel, so one formula, of all parts, each under a scale of its own."""
    scaled = [ScaleKernel(make()) for make in PARTS.values()]
    total = scaled[0]
    for one in scaled[1:]:
        total = total + one
    return ScaleKernel(total).to(dtype), scaled


def points(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, grad: bool = False) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype).requires_grad_(grad)


def product(kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    others = None if x1 is x2 else tree.read(kernel, x2).points
    return matmul(tree.read(kernel, x1), others, rhs, usual(x1.device), keops_product.product)


def dense(kernel: Kernel, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """The cross block of the matrix of all points."""
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    both = torch.cat([x.expand(*batch, *x.shape[-2:]) for x in (x1, x2)], dim=-2)
    n = x1.shape[-2]
    return tree.dense(tree.read(kernel, both))[..., :n, n:]


@needs_keops
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_every_part_alone_and_all_together(dtype, capfd):
    kernel, scaled = everything(dtype)
    x1, x2 = points(13, D, dtype=dtype), points(9, D, seed=1, dtype=dtype)
    x2[:4] = x1[:4]  # some points coincide
    tolerance = 1e-13 if dtype is torch.float64 else 1e-5
    for chosen in [*scaled, None]:
        for one in scaled:
            one.raw_outputscale.data.fill_(0.5 if chosen in (one, None) else -200.0)  # a scale of nearly nothing
        exact = copy.deepcopy(kernel).double()
        for a, b in ((x1, x2), (x2, x1), (x1, x1)):
            rhs = points(len(b), COLUMNS, seed=2, dtype=dtype)
            found, truth = product(kernel, a, b, rhs), dense(exact, a.double(), b.double()) @ rhs.double()
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), truth, rtol=tolerance, atol=tolerance)
    assert capfd.readouterr().out == "", "compiling is nothing that a user's program prints"


@needs_keops
@pytest.mark.parametrize("same", [False, True])
def test_gradients_by_everything(same):
    kernel, scaled = everything()
    with torch.no_grad():
        for index, one in enumerate(scaled):
            one.outputscale = 0.5 + 0.1 * index
    x1, rhs = points(30, D, grad=True), points(30 if same else 20, COLUMNS, seed=2, grad=True)
    with torch.no_grad():
        x1[20:25] = x1[:5]  # zero distances give no NaN
    x2 = x1 if same else points(20, D, seed=1, grad=True)
    inputs = [x1, rhs, *kernel.parameters()] + ([] if same else [x2])
    weights = points(30, COLUMNS, seed=3)
    # of the Matérn 1/2 the reference takes the same finite slope at zero distance
    values = product(kernel, x1, x2, rhs), dense(kernel, x1, x2) @ rhs
    found, truth = (torch.autograd.grad((value * weights).sum(), inputs) for value in values)
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-9)


@needs_keops
@pytest.mark.slow
@pytest.mark.parametrize(
    "shapes",
    [((1, D), (20, D), (20, 2)), ((7, D), (1, D), (1, 4)), ((0, D), (5, D), (5, 2)), ((4, D), (0, D), (0, 2)),
     ((3, D), (4, D), (4, 7)),
     ((2, 7, D), (5, D), (5, 2)), ((2, 1, 7, D), (3, 5, D), (5, 2)), ((7, D), (5, D), (4, 5, 2))],
    ids=str,
)  # fmt: skip
def test_shapes_and_batches(shapes, monkeypatch):
    monkeypatch.setattr(keops_product, "_WIDTHS", (4,))  # seven columns are taken in two parts
    batched = max(map(len, shapes)) > 2
    own = torch.Size([2]) if len(shapes[0]) == 3 else torch.Size()
    kernel = RBFKernel(batch_shape=own).double() if batched else everything()[0]
    x1, x2, rhs = (points(*shape, seed=i, grad=True) for i, shape in enumerate(shapes))
    found, truth = product(kernel, x1, x2, rhs), dense(kernel, x1, x2) @ rhs
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    weights = points(*truth.shape, seed=9)
    inputs = [x1, x2, rhs, *kernel.parameters()]
    own, expected = (
        torch.autograd.grad((value * weights).sum(), inputs, allow_unused=True, materialize_grads=True)
        for value in (found, truth)
    )
    torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


@needs_keops
@pytest.mark.slow
def test_second_derivatives_are_right():
    kernel, x, rhs = ScaleKernel(RQKernel()).double().requires_grad_(False), points(12, D), points(12, 1, seed=1)
    y = points(12, D, grad=True)  # as x, by value

    def twice(value):
        (first,) = torch.autograd.grad((value * points(12, 1, seed=2)).sum(), y, create_graph=True)
        return value.detach(), first.detach(), torch.autograd.grad(first.square().sum(), y)[0]

    found, truth = twice(product(kernel, x, y, rhs)), twice(dense(kernel, x, y) @ rhs)
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-10)


def test_many_dimensions_are_refused():
    assert keops_product.unsupported(150) is None
    for refused in ((1000,), (150, "cuda"), (1, "mps")):
        assert "too large" in keops_product.unsupported(*refused)


PROGRAM = """
import torch
from gpytorch.kernels import RBFKernel
from autokern.core.errors import AutokernError
from autokern.kernels import tree
from autokern.backends import keops_product as lazy
read = tree.read(RBFKernel(), torch.rand(9, 2))
for _ in range(2):
    try:
        lazy.product(read, None, torch.rand(9, 1), None)
    except AutokernError as error:
        print("KeOpsError:", error)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    os.name != "posix" or keops_product.keops_problem() is not None, reason="needs KeOps and a POSIX shell"
)
@pytest.mark.parametrize(("compiler", "words"), [(None, "C++ compiler"), ("exit 1", "could not build")])
def test_a_compiler_that_is_missing_or_broken_ends_in_an_exception(tmp_path, compiler, words):
    (tmp_path / "bin").mkdir()
    if compiler is not None:
        (tmp_path / "bin" / "g++").write_text(f"#!/bin/sh\n{compiler}\n")
        (tmp_path / "bin" / "g++").chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k != "CXX"}
    environment |= {"PATH": str(tmp_path / "bin"), "KEOPS_CACHE_FOLDER": str(tmp_path / "keops")}
    environment["PYTHONPATH"] = os.pathsep.join(place for place in sys.path if place and "pykeops" not in place.lower())
    told = python("-c", PROGRAM, env=environment, check=True)
    lines = [line for line in told.stdout.splitlines() if line.startswith("KeOpsError:")]
    assert len(lines) == 2
    assert all(words in line and "AUTOKERN_EXCLUDE=keops" in line for line in lines)


@needs_keops
def test_other_errors_are_told_as_ours_and_a_lack_of_memory_is_not(monkeypatch):
    @as_if_of_autokern
    def fails(error):
        with keops_product.at_work():
            raise error

    with pytest.raises(AutokernError, match="ValueError: no good"):
        fails(ValueError("no good"))
    with pytest.raises(torch.OutOfMemoryError):
        fails(torch.OutOfMemoryError("no memory"))
    assert keops_product.keops_problem() is None
    with pytest.raises(AutokernError, match="could not build"):
        fails(ImportError("No module named 'pykeops_cpp_0'"))
    assert "could not build" in keops_product.keops_problem()
    with pytest.raises(autokern.AutokernError, match="AUTOKERN_EXCLUDE=keops"), keops_product.at_work():
        raise AssertionError("it is not tried again")


@pytest.fixture
def pykeops(monkeypatch, tmp_path):
    """A pykeops that nobody needs to install, with a build folder of its own."""
    module = types.ModuleType("pykeops")
    module.verbose = "some"
    module.get_build_folder = lambda: str(tmp_path)
    module.config = types.SimpleNamespace(gpu_available=False, pykeops_nvrtc_name=lambda type: str(tmp_path / "nvrtc"))
    core = types.ModuleType("keopscore")
    core.verbose = "all"
    monkeypatch.setitem(sys.modules, "pykeops", module)
    monkeypatch.setitem(sys.modules, "keopscore", core)
    monkeypatch.setattr(keops_product, "_spec", lambda package: package)
    monkeypatch.setattr(keops_product, "compiler", lambda: "g++")
    return module


def test_obstacles(pykeops, monkeypatch, tmp_path):
    assert keops_product.keops_problem() is None
    assert "kind mps" in keops_product.keops_problem("mps")
    assert "no CUDA toolkit" in keops_product.keops_problem("cuda")  # it would crash
    pykeops.config.gpu_available = True
    assert "interface" in keops_product.keops_problem("cuda")
    (tmp_path / "nvrtc").touch()
    assert keops_product.keops_problem("cuda") is None
    pykeops.get_build_folder = lambda: str(tmp_path / "gone")
    assert "cannot be written" in keops_product.keops_problem()
    with pytest.raises(AutokernError, match="KEOPS_CACHE_FOLDER"), keops_product.at_work():
        raise AssertionError("it is not tried")
    monkeypatch.setattr(keops_product, "compiler", lambda: None)
    assert "C++ compiler" in keops_product.keops_problem()
    monkeypatch.delitem(sys.modules, "pykeops")
    monkeypatch.setitem(sys.modules, "gpytorch.kernels.keops.keops_kernel", types.ModuleType("keops_kernel"))
    assert "importing it fails" in keops_product.keops_problem()
    monkeypatch.setattr(keops_product, "_spec", lambda package: None)
    assert keops_product.keops_problem().startswith("pykeops is not installed")


def test_the_compiler_is_found_by_the_rule_of_torch_and_keops(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert host.compiler() is None
    (tmp_path / "mine").write_text("#!/bin/sh\n")
    (tmp_path / "mine").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "mine"))
    assert host.compiler() == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("ends", "says", "children"),
    [
        (lambda: types.SimpleNamespace(returncode=0), "", 1),
        (lambda: types.SimpleNamespace(returncode=-11), "LD_PRELOAD", 1),
        (lambda: types.SimpleNamespace(returncode=-6), "status -6", 1),
        (lambda: types.SimpleNamespace(returncode=1), "status 1", 2),  # memory may be there another time
        (mock.Mock(side_effect=subprocess.TimeoutExpired("python", 120)), "TimeoutExpired", 2),
        (mock.Mock(side_effect=OSError("no more processes")), "OSError", 2),
    ],
)
@pytest.mark.parametrize("begun", [False, True])  # a mark that another process has not written yet counts as none
def test_the_first_formula_on_a_gpu_is_tried_by_a_child(pykeops, monkeypatch, tmp_path, ends, says, children, begun):
    tried, told = [], []
    monkeypatch.setattr(keops_product.subprocess, "run", lambda *command, **_: tried.append(command) or ends())
    pykeops.config.gpu_available = True
    (tmp_path / "nvrtc").touch()
    if begun:
        (tmp_path / f"autokern-{keops_product.torch.__version__}").touch()
    for _ in range(2):  # processes
        keops_product._trial.cache_clear()
        for _ in range(2):
            try:
                with keops_product.at_work("cuda"):
                    told.append("")
            except AutokernError as error:
                told.append(str(error))
    keops_product._trial.cache_clear()
    assert told[::2] == told[1::2], "each process tries once"
    assert [(says in one, bool(one)) for one in told] == [(True, bool(says))] * 4
    assert len(tried) == children


def test_its_messages_are_off_while_it_works_and_as_before_afterwards(pykeops):
    core = sys.modules["keopscore"]
    with keops_product.at_work():
        with keops_product.at_work():
            assert (pykeops.verbose, core.verbose) == (False, False)
        assert (pykeops.verbose, core.verbose) == (False, False)
    assert (pykeops.verbose, core.verbose) == ("some", "all")

    @as_if_of_autokern
    def fails():
        with keops_product.at_work():
            raise ValueError("no good")

    with pytest.raises(AutokernError):
        fails()
    assert (pykeops.verbose, core.verbose) == ("some", "all")
