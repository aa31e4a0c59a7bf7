"""T10: life beside everything else. Compilers, tracers, transforms, pickles, forks, workers, threads, other libraries.

Every case is a program of its own in a fresh interpreter in which any warning is an error; what it asserts must hold.
"""

import os
import textwrap

import pytest
from support.programs import PATH, python

SOURCE = """
import warnings
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
import sys, threading
import torch, gpytorch, linear_operator
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from linear_operator.operators import DenseLinearOperator
from support.models import ExactModel
from support.models import step as taken

def Model(n=40):
    x = torch.linspace(0, 1, n, dtype=torch.float64).unsqueeze(-1)
    return ExactModel(x, (5 * x[:, 0]).sin(), ScaleKernel(MaternKernel(2.5))).double()

def step(model):
    loss, slopes = taken(model)
    return torch.stack([loss, *(slope.sum() for slope in slopes)])

def predict(model):
    model.eval()
    with torch.no_grad():
        found = model(POINTS)
        return torch.cat([found.mean, found.variance])

POINTS = torch.linspace(-0.1, 1.2, 7, dtype=torch.float64).unsqueeze(-1)

class Data(torch.utils.data.Dataset):
    def __init__(self, models):
        self.models = models

    def __len__(self):
        return len(self.models)

    def __getitem__(self, index):
        import autokern
        with autokern.enabled():
            return torch.cat([step(self.models[index]), predict(self.models[index])])

def near(one, other, bound=1e-8):
    torch.testing.assert_close(one, other, rtol=bound, atol=bound)

def spd(n, b=()):
    a = torch.randn(*b, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return a @ a.mT + n * torch.eye(n, dtype=torch.float64)
"""
"""What programs share, also with the processes that they start."""

COMMON = """
import autokern

def same(call):
    # with autokern and without: the same result, or the same exception
    outcomes = []
    for context in (warnings.catch_warnings(), autokern.enabled()):
        with context:
            try:
                outcomes.append(call())
            except Exception as error:
                outcomes.append(error)
    one, other = outcomes
    assert type(one) is type(other), outcomes
    if not isinstance(one, Exception):
        near(one, other)

torch.set_num_threads(1)
STOCK = step(Model()), predict(Model())
x, kernel = torch.rand(12, 2, dtype=torch.float64), RBFKernel(ard_num_dims=2).double()
"""

CASES = {
    "torch.compile": """
        def f(a):
            return torch.linalg.cholesky(a @ a.mT + torch.eye(a.shape[-1], dtype=a.dtype)).sum()
        with autokern.enabled():
            compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
            a = spd(9).requires_grad_()
            near(compiled(a), f(a))
            near(torch.autograd.grad(compiled(a), a)[0], torch.autograd.grad(f(a), a)[0])
        whole = {"fullgraph": True, "backend": "eager"}
        same(lambda: torch.compile(lambda a: DenseLinearOperator(a)._matmul(a).sum(), **whole)(spd(5)))
        same(lambda: torch.compile(lambda z: kernel.forward(z, z).sum(), **whole)(x))
        same(lambda: torch.compile(lambda z: kernel(z).to_dense().sum(), backend="eager")(x))
        """,
    "forked and spawned workers of a DataLoader": """
        models = [Model(20 + index) for index in range(4)]
        expected = torch.stack([torch.cat([step(model), predict(model)]) for model in models])
        with autokern.enabled():
            near(step(Model()), STOCK[0])
            for method in ("fork", "spawn"):
                loader = torch.utils.data.DataLoader(
                    Data(models), batch_size=2, num_workers=2, multiprocessing_context=method)
                near(torch.cat(list(loader)), expected)
            near(step(Model()), STOCK[0])
        """,
    "64 threads enabling and disabling": """
        errors = []
        def run(number):
            try:
                for _ in range(4):
                    with autokern.enabled():
                        near(step(Model()), STOCK[0])
                    if number % 4 == 0:
                        with autokern.enabled(), autokern.using(force={"kernel_matrix": "stock"}):
                            near(predict(Model()), STOCK[1])
            except BaseException as error:
                errors.append(error)
        before = gpytorch.kernels.RBFKernel.forward, linear_operator.utils.cholesky._psd_safe_cholesky
        threads = [threading.Thread(target=run, args=(n,)) for n in range(64)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not errors, errors[0]
        assert not autokern.hooks.install.is_enabled()
        assert (gpytorch.kernels.RBFKernel.forward, linear_operator.utils.cholesky._psd_safe_cholesky) == before
        near(step(Model()), STOCK[0])
        """,
}


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", CASES)
def test_a_program_works_beside(name, tmp_path, in_earnest):
    program = tmp_path / "program.py"  # spawned processes import it under another name
    guarded = textwrap.indent(COMMON + textwrap.dedent(CASES[name]), "    ")
    program.write_text(f"{SOURCE}\nif __name__ == '__main__':\n{guarded}", encoding="utf-8")
    orders = {"AUTOKERN_BUDGET": "2", "AUTOKERN_CALIBRATE": "first-use", "PYTHONWARNINGS": "error"}
    orders["PYTHONPATH"] = os.pathsep.join(PATH)
    # KeOps rewrites its list when a process ends, and one that imports it meanwhile reads an empty file
    orders["KEOPS_CACHE_FOLDER"] = str(tmp_path / "keops")
    for _ in range(3 if in_earnest else 1):
        done = python(program.name, cwd=tmp_path, timeout=400, **orders)
        assert done.returncode == 0, done.stderr
