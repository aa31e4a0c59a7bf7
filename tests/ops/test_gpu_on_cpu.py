"""What is for a GPU runs to its end and gives the right numbers where the CPU plays one; see `support.gpu_on_cpu`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("c++") is None or sys.platform != "linux", reason="needs a C++ compiler, and Linux"
    ),
    pytest.mark.skipif(torch.version.cuda is not None, reason="needs a build of torch without CUDA"),
    pytest.mark.skipif("support.gpu_on_cpu" in sys.modules, reason="the CPU plays a GPU already"),
]


def played(tmp_path, *arguments, **environment):
    """What a command of Python prints where the CPU plays a GPU."""
    surroundings = {**os.environ, "AUTOKERN_HOME": str(tmp_path), "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    surroundings = {k: v for k, v in surroundings.items() if not k.startswith(("PYTEST_", "COV_"))}
    surroundings.update(environment)
    return subprocess.run(
        [sys.executable, *arguments], env=surroundings, check=False, capture_output=True, text=True, timeout=280
    )


@pytest.mark.timeout(300)
def test_all_tests_for_a_gpu_pass(tmp_path):
    options = ("-p", "support.gpu_on_cpu", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider", "-q", str(TESTS))
    found = played(tmp_path, "-m", "pytest", *options, AUTOKERN_GRAPHS="on")
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
    assert int(found.stdout.rpartition(" passed")[0].split()[-1]) > 50


CROSSED = """
import gpytorch, torch, autokern.auto, autokern
from support.gpu_on_cpu import LIBRARY, launches

matrix = torch.eye(3, device="cuda", dtype=torch.float64)
assert matrix.is_cuda and type(matrix) is torch.Tensor
for call in (lambda: matrix + torch.eye(3, dtype=torch.float64), lambda: matrix @ torch.eye(3, dtype=torch.float64)):
    try:
        call()
    except RuntimeError as error:
        assert "same device" in str(error), error
    else:
        raise AssertionError("operands on two devices")
LIBRARY.gpu_forget()
assert matrix.sum().item() == 3
assert LIBRARY.gpu_waits() == 1 and sum(launches(LIBRARY).values()) == 1
inside = []
root = matrix.clone().requires_grad_()
root.register_hook(lambda grad: inside.append(__import__("threading").get_ident()))
(root * 2).sum().backward()
assert root.grad.is_cuda and inside != [__import__("threading").get_ident()]
for name in autokern.op("qr").names():  # cotangents batched by vmap, in the thread of the backward pass
    if autokern.op("qr")[name].why_not(autokern.Problem(op="qr", m=6, n=4, grad="a", device="cuda")):
        continue
    a = torch.rand(6, 4, dtype=torch.float64, device="cuda", requires_grad=True)
    with autokern.using(force={"qr": name}):
        q, r = autokern.linalg.qr(a)
    flat = torch.cat([q.reshape(-1), r.reshape(-1)])
    each = torch.eye(len(flat), dtype=flat.dtype, device="cuda")
    (together,) = torch.autograd.grad(flat, a, each, is_grads_batched=True, retain_graph=True)
    alone = torch.stack([torch.autograd.grad(flat, a, one, retain_graph=True)[0] for one in each])
    torch.testing.assert_close(together, alone)
print("as on a GPU")
"""


def test_the_rules_of_a_gpu_hold(tmp_path):
    (tmp_path / "program.py").write_text(CROSSED)
    found = played(tmp_path, str(TESTS / "support/gpu_on_cpu.py"), str(tmp_path / "program.py"))
    assert found.stdout.endswith("as on a GPU\n"), found.stdout + found.stderr


COUNTED = """
from botorch.optim.closures.core import NdarrayOptimizationClosure
import sys
import torch, autokern
from hooks.test_on_accelerators import CASES, closure, fitted
from support.models import ExactModel
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import LinearMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import GammaPrior
from support.gpu_on_cpu import LIBRARY, launches

def counted(call):
    for _ in range(3):
        LIBRARY.gpu_forget()
        call()
    return sum(launches(LIBRARY).values())

def step(dtype, kernel):
    x = torch.rand(50, 2, dtype=dtype, device="cuda")
    noisy = GaussianLikelihood(GammaPrior(1.1, 0.05))
    model = ExactModel(x, x.sum(-1), kernel(), noisy, LinearMean(2)).to(x)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    return lambda: (-mll(model(x), model.train_targets)).backward()

kernels = (
    lambda: ScaleKernel(RBFKernel()),
    lambda: ScaleKernel(MaternKernel(2.5, ard_num_dims=2)) + ScaleKernel(RBFKernel()),
    lambda: ScaleKernel(RBFKernel() * PeriodicKernel()),
)
steps = [lambda d=dtype, k=kernel: step(d, k) for dtype in (torch.float32, torch.float64) for kernel in kernels]

def flat(case):
    _, parameters, inner = closure(fitted("cuda", *CASES[case]))
    return NdarrayOptimizationClosure(inner, parameters)

closures = [lambda case=case: flat(case) for case in CASES]
with autokern.enabled():
    for made in (steps, closures):
        for side in ("stock", "arrays"):
            with autokern.using(force={"objective": side, "exact_log_prob": "stock"}):
                found = [counted(one()) for one in made]
            print(min(found), max(found))
"""


def test_arrays_launch_as_few_kernels_as_the_docs_say(tmp_path):
    (tmp_path / "program.py").write_text(COUNTED)
    found = played(tmp_path, str(TESTS / "support/gpu_on_cpu.py"), str(tmp_path / "program.py"))
    assert found.returncode == 0, found.stderr
    measured = [int(word) for line in found.stdout.splitlines()[-4:] for word in line.split()]
    page = " ".join((TESTS.parent / "docs/cpu-or-gpu.md").read_text(encoding="utf-8").split())
    pair = r"(\d+) to (\d+)"
    told = re.search(f"launch {pair} kernels in stock and {pair} so, a closure of BoTorch {pair} and {pair}", page)
    assert told is not None
    assert measured == pytest.approx([int(word) for word in told.groups()], rel=0.25)
