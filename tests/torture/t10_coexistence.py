"""T10: life beside everything else. Compilers, tracers, transforms, pickles, forks, workers, threads, other libraries.

Every case is a program of its own in a fresh interpreter in which any warning is an error; what it asserts must hold.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

from harness import Findings, Mutation, main

SOURCE = """
import warnings
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
import sys, os, copy, pathlib, pickle, io, textwrap, threading
import torch, gpytorch, linear_operator
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

class Model(gpytorch.models.ExactGP):
    def __init__(self, n=40):
        x = torch.linspace(0, 1, n, dtype=torch.float64).unsqueeze(-1)
        super().__init__(x, (5 * x[:, 0]).sin(), gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(MaternKernel(2.5))
        self.double()

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

def loss(model):
    model.train()
    return -gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)(
        model(*model.train_inputs), model.train_targets)

def step(model):
    model.zero_grad()
    value = loss(model)
    value.backward()
    return torch.stack([value.detach(), *(p.grad.sum() for p in model.parameters())])

def predict(model, points=7):
    model.eval()
    with torch.no_grad():
        found = model(torch.linspace(-0.1, 1.2, points, dtype=torch.float64).unsqueeze(-1))
        return torch.cat([found.mean, found.variance])

def near(one, other, bound=1e-8):
    torch.testing.assert_close(one, other, rtol=bound, atol=bound)

COPIED = ("model", "lazy", "prior")

def values(things):
    # numbers that tell what each thing is
    found = {}
    for name, thing in things.items():
        if isinstance(thing, gpytorch.distributions.MultivariateNormal):
            found[name] = torch.cat([thing.mean, thing.covariance_matrix.flatten()]).detach()
        elif isinstance(thing, torch.nn.Module):
            found[name] = torch.cat([predict(thing), step(thing) if name == "model" else predict(thing)]).detach()
        else:
            found[name] = thing.to_dense().detach()
    return found

def spd(n, b=()):
    a = torch.randn(*b, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return a @ a.mT + n * torch.eye(n, dtype=torch.float64)
"""
"""What programs share, and write to a file where other processes must import it."""

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
    assert isinstance(one, Exception) == isinstance(other, Exception), outcomes
    assert type(one) is type(other), outcomes
    if not isinstance(one, Exception):
        near(one, other)

STOCK = step(Model()), predict(Model())
"""

CASES = {
    "torch.compile of a factorisation": """
        from linear_operator.utils.cholesky import psd_safe_cholesky
        def f(a):
            return torch.linalg.cholesky(a @ a.mT + torch.eye(a.shape[-1], dtype=a.dtype)).sum()
        with autokern.enabled():
            compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
            a = spd(9).requires_grad_()
            near(compiled(a), f(a))
            near(torch.autograd.grad(compiled(a), a)[0], torch.autograd.grad(f(a), a)[0])
        """,
    "torch.compile of operators and kernels": """
        from linear_operator.operators import DenseLinearOperator
        x = torch.rand(12, 2, dtype=torch.float64)
        kernel = RBFKernel(ard_num_dims=2).double()
        whole = {"fullgraph": True, "backend": "eager"}
        same(lambda: torch.compile(lambda a: DenseLinearOperator(a)._matmul(a).sum(), **whole)(spd(5)))
        same(lambda: torch.compile(lambda z: kernel.forward(z, z).sum(), **whole)(x))
        same(lambda: torch.compile(lambda z: kernel(z).to_dense().sum(), backend="eager")(x))
        """,
    "vmap": """
        from linear_operator.operators import DenseLinearOperator
        from linear_operator.utils.cholesky import psd_safe_cholesky
        kernel = RBFKernel(ard_num_dims=2).double()
        a = spd(6, (3,))
        same(lambda: torch.vmap(lambda m: DenseLinearOperator(m)._matmul(m))(a))
        same(lambda: torch.vmap(lambda x: kernel.forward(x, x))(torch.rand(4, 9, 2, dtype=torch.float64)))
        same(lambda: torch.vmap(psd_safe_cholesky)(a))
        same(lambda: torch.vmap(torch.linalg.cholesky)(a))
        """,
    "models and distributions pickled while enabled are read in a process without autokern": """
        import subprocess
        pathlib.Path("common.py").write_text(SOURCE)
        import common
        points = torch.linspace(-0.1, 1.2, 7, dtype=torch.float64).unsqueeze(-1)
        def made():
            model = common.Model()
            common.step(model)
            common.predict(model)
            kernel, (x,) = model.covar_module, model.train_inputs
            with torch.no_grad():
                model.train()
                prior = model(x)
                model.eval()
                return {
                    "model": model, "posterior": model(points), "predictive": model.likelihood(model(points)),
                    "prior": prior, "lazy": kernel(points), "jittered": kernel(points).add_jitter(0.1),
                    "fantasy": model.get_fantasy_model(points[:2], torch.ones(2, dtype=torch.float64)),
                }
        with autokern.enabled():
            things = made()
            told = common.values(things)
            pickles = {name: pickle.dumps(thing) for name, thing in things.items()}
            copies = {name: copy.deepcopy(thing) for name, thing in made().items() if name in common.COPIED}
            limited = RBFKernel().double()
            with autokern.using(memory="90MiB"):  # too little for the matrix: it stays a product with it
                free = limited(torch.rand(3500, 2, dtype=torch.float64)).evaluate_kernel()
                pickles["matrix-free"] = pickle.dumps(free.detach())
                large = common.Model(3500)
                common.step(large)
                mean = common.predict(large)[:7]
                pickles["large"] = pickle.dumps((large, mean))
        for name, thing in copies.items():
            near(common.values({name: thing})[name], told[name])
        loaded = {name: pickle.loads(data) for name, data in pickles.items() if name in told}
        for name, value in common.values(loaded).items():
            near(value, told[name])
        pathlib.Path("pickles").write_bytes(pickle.dumps((pickles, told)))
        code = textwrap.dedent('''
            import sys
            class Hidden:
                def find_spec(self, name, path=None, target=None):
                    if name.partition(".")[0] == "autokern":
                        raise ImportError(name)
            sys.meta_path.insert(0, Hidden())
            sys.path.insert(0, "")
            import common, pickle
            pickles, told = pickle.loads(common.pathlib.Path("pickles").read_bytes())
            found = {}
            for name, data in pickles.items():
                try:
                    found[name] = pickle.loads(data)
                except Exception as error:
                    raise AssertionError(f"{name}: {error!r}") from error
            free = found.pop("matrix-free")
            assert free.shape == (3500, 3500) and bool(free.to_dense().diagonal().allclose(free.diagonal()))
            large, mean = found.pop("large")
            common.near(common.predict(large)[:7], mean, 1e-3)
            for name, value in common.values(found).items():
                common.near(value, told[name])
        ''')
        subprocess.run([sys.executable, "-c", code], check=True)
        """,
    "a fork after enabling": """
        torch.set_num_threads(1)
        with autokern.enabled():
            near(step(Model()), STOCK[0])
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    near(step(Model()), STOCK[0])
                    near(predict(Model()), STOCK[1])
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            near(step(Model()), STOCK[0])
        """,
    "workers of a DataLoader": """
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 6
            def __getitem__(self, index):
                return step(Model(20 + index))
        torch.set_num_threads(1)
        expected = torch.stack([Data()[i] for i in range(6)])
        with autokern.enabled():
            found = torch.cat(list(torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2)))
        near(found, expected)
        """,
    "spawned processes": """
        # the child imports this file's text as a module: nothing of it may run twice
        import multiprocessing, importlib.util
        with autokern.enabled():
            context = multiprocessing.get_context("spawn")
            with context.Pool(1) as pool:
                assert pool.apply(abs, (-3,)) == 3
            near(step(Model()), STOCK[0])
        """,
    "spawned workers of a DataLoader": """
        pathlib.Path("common.py").write_text(SOURCE)
        pathlib.Path("data.py").write_text(textwrap.dedent('''
            import common  # with its filter of warnings
            import autokern, torch
            class Data(torch.utils.data.Dataset):
                def __init__(self, models):
                    self.models = models
                def __len__(self):
                    return len(self.models)
                def __getitem__(self, index):
                    with autokern.enabled():
                        return common.step(self.models[index])
        '''))
        sys.path.insert(0, "")
        import common, data
        torch.set_num_threads(1)
        with autokern.enabled():
            models = [common.Model(20 + index) for index in range(4)]
            expected = torch.stack([common.step(model) for model in models])
            loader = torch.utils.data.DataLoader(
                data.Data(models), batch_size=2, num_workers=2, multiprocessing_context="spawn")
            found = torch.cat(list(loader))
        near(found, expected)
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
        torch.set_num_threads(1)
        before = gpytorch.kernels.RBFKernel.forward, linear_operator.utils.cholesky._psd_safe_cholesky
        threads = [threading.Thread(target=run, args=(n,)) for n in range(64)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not errors, errors[0]
        assert not autokern.hooks.install.is_enabled()
        assert (gpytorch.kernels.RBFKernel.forward, linear_operator.utils.cholesky._psd_safe_cholesky) == before
        near(step(Model()), STOCK[0])
        """,
    "sklearn, BoTorch and pyro": """
        warnings.simplefilter("ignore")
        with autokern.enabled():
            for name in ("sklearn.gaussian_process", "botorch", "pyro"):
                try:
                    __import__(name)
                except ImportError:
                    print("absent:", name)
            near(step(Model()), STOCK[0])
        near(step(Model()), STOCK[0])
        """,
}


class Size(NamedTuple):
    """How much is done: times that each program is run."""

    times: int


SIZES = {"ci": Size(1), "full": Size(3)}


def _run(code: str) -> str:
    """Run a program, which measures at once; return what went wrong."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "AUTOKERN_HOME": home, "AUTOKERN_BUDGET": "2", "PYTHONWARNINGS": "error"}
        environment["AUTOKERN_CALIBRATE"] = "first-use"
        # KeOps rewrites its list when a process ends, and one that imports it meanwhile reads an empty file
        environment["KEOPS_CACHE_FOLDER"] = str(Path(home) / "keops")
        command = [sys.executable, "-c", code]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=400, check=False, cwd=home
            )
        except subprocess.TimeoutExpired:
            return "hangs"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1][:300]


def programs(found: Findings, size: Size) -> None:
    """Run each program."""
    names = [name for name in CASES for _ in range(size.times)]
    start = f"SOURCE = {SOURCE!r}\n{SOURCE}{COMMON}"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda name: _run(start + textwrap.dedent(CASES[name])), names))
    for name, wrong in zip(names, told, strict=True):
        found.expect(not wrong, f"{name}: {wrong}")
    found.figures["programs"] = f"{len(names)} runs of {len(CASES)} programs"


MUTATIONS = [
    Mutation(
        "disabling puts nothing back",
        "hooks/install.py",
        "            setattr(patch.owner, patch.name, original)",
        "            pass",
        "programs",
    ),
]

if __name__ == "__main__":
    main({"programs": programs}, SIZES)
