"""A program for `autokern run` that knows nothing of ranks, unless it is asked for a process group of its own."""

import sys

import torch
from gpytorch.kernels import MaternKernel

import autokern

if "own" in sys.argv:
    torch.distributed.init_process_group("gloo")
generator = None if "unseeded" in sys.argv else torch.Generator().manual_seed(0)
x = torch.rand(4200, 2, generator=generator, dtype=torch.float64)
if "own" in sys.argv:
    x = x + torch.distributed.get_rank()
kernel = MaternKernel(2.5).double()
kernel.lengthscale = 0.3
out = autokern.covariance.matmul(kernel, x, x, x)
out.sum().backward()
numbers, served = (out.sum().item(), kernel.raw_lengthscale.grad.item()), autokern.stats()["kernel_matmul"]
sys.stdout.write(f"found {numbers[0]!r} {numbers[1]!r} {served}\n")  # at once: ranks share the stream
if "own" in sys.argv:
    torch.distributed.destroy_process_group()
