"""One rank of a job, or one process: what stands on products over ranks, as JSON in one line.

A gpytorch model that knows nothing of ranks: density and gradients by iterations, solves, predictions and samples.
"""

import io
import json
import sys
from typing import Any

import gpytorch
import torch
from models import ExactModel, step

import autokern
from autokern.core.decision import Solved, collecting
from autokern.density import iterated_density
from autokern.hooks.kernel_operator import matrix_free
from autokern.kernels import matmul
from autokern.runtime import dispatch, ranks
from autokern.system import ranks as system

N, TESTS = 2500, 40
POINTS = torch.rand(N + TESTS, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
X, Y, NEW = POINTS[:N, :2].contiguous(), (6 * POINTS[:N, 0]).sin() + 0.3 * POINTS[:N, 2], POINTS[N:, :2].contiguous()

REFINED = iterated_density._REFINED


def made(lengthscale: float) -> Any:
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(2.5))
    kernel.base_kernel.lengthscale = lengthscale
    model = ExactModel(X, Y, kernel)
    model.likelihood.noise = 0.05
    return model.double()


def density(lengthscale: float, double: bool = True) -> tuple[list[float], str]:
    """Loss and gradients of the second step, and the preconditioner that served it; all products `double` or not."""
    model = made(lengthscale)
    iterated_density._REFINED = 1.0 if double else REFINED
    seen: list[Solved] = []
    with autokern.using(force={"exact_log_prob": "preconditioned"}), collecting(seen.extend):
        _, (loss, gradients) = step(model), step(model)
    return [loss.item(), *(float(gradient.sum()) for gradient in gradients)], seen[-1].preconditioner


def predictions() -> dict[str, list[float]]:
    """Mean, variances and samples of a model that is never formed."""
    model = made(0.4).eval()
    forced = "distributed" if system.held else "tiled-symmetric"
    orders = autokern.using(memory="145MB", force={"kernel_matmul": forced, "solve": "preconditioned"})
    with torch.no_grad(), orders:
        out = model(NEW)
        found = {"mean": out.mean, "variance": out.variance}
        torch.manual_seed(3)
        found["samples"] = out.sample(torch.Size([2]))
    used = {"used": {op: dispatch.stats().get(op, {}) for op in ("kernel_matmul", "solve", "predict")}}
    return {name: t.flatten().tolist() for name, t in found.items()} | used


def gradients_of_the_library() -> list[float]:
    """Gradients of a quadratic form that the library differentiates itself."""
    kernel = gpytorch.kernels.RBFKernel().double()
    a = torch.linspace(-1, 1, N, dtype=torch.float64).unsqueeze(-1)
    form = (matrix_free(kernel, X, X).matmul(a) * a).sum()
    form.backward()
    found = matrix_free(kernel, X, X)._bilinear_derivative(a, a)
    return [form.item(), float(kernel.raw_lengthscale.grad), *(float(t.sum()) for t in found if t is not None)]


def saved() -> str:
    """The checkpoint of a model that was trained for a step, in hexadecimal digits."""
    model, file = made(0.4), io.BytesIO()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with autokern.using(force={"exact_log_prob": "preconditioned"}):
        step(model)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file.getvalue().hex()


def main() -> None:
    matmul.LEAST, matmul._MOST = 1, 0.0
    iterated_density.DENSE = 0  # the matrix is never held
    autokern.enable()
    if system.is_job():
        ranks.begin(timeout=float(sys.argv[1]))
    before = system.held.calls if system.held else 0  # type: ignore[union-attr]
    found: dict[str, Any] = {}
    found["single"], _ = density(0.8, double=False)  # first: all that follows is in double precision
    found["pivoted"], found["of pivoted"] = density(0.8)
    found["vecchia"], found["of vecchia"] = density(0.05)
    found |= predictions()
    found["derivative"] = gradients_of_the_library()
    found["saved"] = saved()
    if (here := system.held) is not None:
        found["collectives"] = here.calls - before
    print(json.dumps(found), flush=True)
    if here is not None:
        here.barrier()
        ranks.end()


if __name__ == "__main__":
    main()
