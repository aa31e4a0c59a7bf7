"""What needs torch's rules for tensors without data, each as the first that a process does; run as a program.

It prints what each use gives or raises, by the names of some. With the word `on` before them, autokern imports torch.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

if __name__ == "__main__" and sys.argv[1] == "on":
    import autokern.auto  # noqa: F401

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def meta(*shape):
    return torch.empty(shape, device="meta")


def loaded():
    file = io.BytesIO()
    torch.save({"a": torch.ones(2)}, file)
    file.seek(0)
    return torch.load(file, map_location="meta")


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.rand(4, 4))
        return torch.linalg.cholesky(x @ x.T).shape, torch.linalg.svd(x)[1].shape, torch.ones(3).sum().shape


def traced():
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: torch.linalg.solve_triangular(x, x, upper=True).softmax(0))(torch.eye(3)).code


def in_place(x):
    y = x.clone().add_(1)
    y.index_put_((torch.tensor([0]),), torch.tensor(2.0))
    return y.erfinv_().addcmul_(y, y).masked_fill_(y > 0, 1.0)


def functional():
    torch._enable_functionalization(reapply_views=True)
    try:
        return torch._from_functional_tensor(torch._to_functional_tensor(torch.ones(3)).lerp_(torch.zeros(()), 0.5))
    finally:
        torch._disable_functionalization()


def forward():
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        dual = torch.nn.functional.logsigmoid(forward_ad.make_dual(torch.ones(3), torch.ones(3)))
        return tuple(forward_ad.unpack_dual(dual))


def from_the_package():
    from torch._decomp import get_decompositions

    return sorted(map(str, get_decompositions([torch.ops.aten.addmm, torch.ops.aten.gelu])))


def from_the_module():
    import torch._meta_registrations as rules
    import torch._refs.linalg as refs

    same = sys.modules[rules.__name__] is rules is torch._meta_registrations
    return same, rules.__spec__.origin, torch._refs.__spec__.origin, refs.vector_norm(torch.ones(2))


def absent():
    import torch._refs.nothing

    return torch._refs.nothing


def without_a_kernel():
    library = torch.library.Library("mine", "DEF")
    library.define("f(Tensor x) -> Tensor")
    return torch.ops.mine.f(meta(2))


def by_default():
    torch.set_default_device("meta")
    return torch.ones(3), torch.nn.LSTM(2, 3).weight_ih_l0


def in_context():
    with torch.device("meta"), torch.inference_mode():
        return torch.eye(3).inverse()


def watched(kind, method):
    seen = []

    def watch(self, function, types, args=(), kwargs=None):
        seen.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))

    with type("Watch", (kind,), {method: watch})():
        torch.linalg.cholesky(torch.eye(3, device="meta"))
    return seen


def by_python():
    with torch._C._EnablePythonDispatcher():
        return torch.ones(2, 3) @ torch.ones(3)


def threads():
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda _: torch.linalg.eigh(meta(3, 3))[0].shape, range(8)))


def custom():
    @torch.library.custom_op("mine::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    return torch.library.opcheck(twice, (torch.ones(3),)), twice(meta(2))


USES = {
    "a tensor": lambda: torch.linalg.eigh(meta(3, 3) + 0)[0],
    "a module": lambda: torch.nn.Linear(3, 4, device="meta")(torch.zeros(2, 3, device="meta")),
    "a move": lambda: torch.rand(3, 3).to("meta").cumsum(0).sort()[0],
    "a file": loaded,
    "a zero": lambda: torch._efficientzerotensor(3, device="meta") + 1,
    "a fake tensor": fake,
    "a trace": traced,
    "functions": lambda: torch.func.functionalize(in_place)(torch.zeros(3)),
    "functional tensors": functional,
    "a batched function": lambda: torch.vmap(lambda a: torch.linalg.cholesky(a + 1))(torch.eye(3).expand(2, 3, 3)),
    "a derivative": lambda: torch.func.jvp(lambda a: a.softmax(0).cumprod(0), (torch.ones(3),), (torch.ones(3),)),
    "a dual tensor": forward,
    "an attribute": lambda: torch._refs.add(torch.ones(2), 1),
    "a primitive": lambda: torch.ops.prims.add(torch.ones(2), torch.ones(2)),
    "a namespace": lambda: str(torch.ops.rngprims.philox_rand),
    "a rule": lambda: torch._meta_registrations.pooling_output_shape(10, 3, 0, 1, 1, False),
    "a package": from_the_package,
    "an import": from_the_module,
    "an import of nothing": absent,
    "no kernel": without_a_kernel,
    "an uninitialised module": lambda: torch.nn.utils.skip_init(torch.nn.Linear, 2, 3).weight.shape,
    "a default": by_default,
    "a context": in_context,
    "a dispatch mode": lambda: watched(TorchDispatchMode, "__torch_dispatch__"),
    "a function mode": lambda: watched(TorchFunctionMode, "__torch_function__"),
    "threads": threads,
    "a generator": lambda: torch.rand(2, generator=torch.Generator().manual_seed(0)),
    "a dispatcher": by_python,
    "shapes": lambda: torch.broadcast_shapes((3, 1), (1, 4)),
    "a compiler": lambda: torch.compile(lambda x: torch.nn.functional.gelu(x).sum(), backend="aot_eager")(meta(3)),
    "an export": lambda: torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),)).graph_module.code,
    "an operator": custom,
}


def told(value):
    if isinstance(value, torch.Tensor):
        return [value.shape, value.dtype, value.device, value.stride(), None if value.is_meta else value.tolist()]
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [told(item) for item in value]
    return {key: told(item) for key, item in value.items()} if isinstance(value, dict) else value


def main() -> None:
    warnings.simplefilter("ignore")
    for name in sys.argv[2:]:
        sys.stdout.flush()
        if not (child := os.fork()):
            try:
                found = told(USES[name]())
            except Exception as error:
                found = type(error), str(error)[:500]
            print(f"{name}: {found!r}", flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
