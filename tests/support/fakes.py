"""What stands in for what is not there: CuPy, played by NumPy, recorded steps, a process without autokern."""

import contextlib
import importlib.metadata
import io
import pickle
import sys
from importlib.metadata import EntryPoint
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from autokern.backends import cupy_
from autokern.core import registry


class _WithoutAutokern(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        assert not module.startswith("autokern"), f"{module}.{name} is needed to read this pickle"
        return super().find_class(module, name)


def unpickled_without_autokern(packed: bytes) -> object:
    """What is in a pickle, read as where autokern is not installed."""
    return _WithoutAutokern(io.BytesIO(packed)).load()


def as_if_of_autokern(function: FunctionType) -> FunctionType:
    """The same function in a module of the package, so that its errors are autokern's own."""
    there = {**function.__globals__, "__name__": "autokern.fake"}
    return FunctionType(function.__code__, there, function.__name__, function.__defaults__, function.__closure__)


def install_entry_points(monkeypatch: pytest.MonkeyPatch, points: dict[str, str]) -> None:
    """Let there be these entry points of plugins, `package:name` to value, and no others."""
    found = []
    for label, value in points.items():
        package, _, name = label.partition(":")
        found.append(EntryPoint(name, value, registry.GROUP))
        vars(found[-1]).update(dist=SimpleNamespace(name=package))
    there = {registry.GROUP: found}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: there.get(group, []))
    monkeypatch.setattr(registry, "_plugins", None)


class FakeCuPy:
    """What `install` put in place of CuPy."""

    def __init__(self) -> None:
        self.streams: list[tuple[int, int | None]] = []  # stream and device that each call was made on
        self.calls: list[tuple[str, tuple[int, ...]]] = []  # name and shape of each decomposition
        self._raises = False

    @contextlib.contextmanager
    def errstate(self, *, linalg):
        before, self._raises = self._raises, linalg == "raise"
        try:
            yield
        finally:
            self._raises = before

    @contextlib.contextmanager
    def stream(self, theirs):
        self.streams.append(theirs.cuda_stream)
        yield

    def decomposition(self, name):
        def run(a):
            assert isinstance(a, np.ndarray)
            self.calls.append((name, a.shape))
            try:
                return getattr(np.linalg, name)(a)
            except np.linalg.LinAlgError:
                if self._raises:
                    raise
                return a.copy()  # as cuSOLVER leaves it where nobody asks

        return run


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuPy:
    """Let NumPy play CuPy, and the CPU the CUDA device."""
    fake, cupy, cupyx = FakeCuPy(), ModuleType("cupy"), ModuleType("cupyx")
    cupy.from_dlpack = np.from_dlpack
    cupy.cuda = SimpleNamespace(Device=contextlib.nullcontext, Stream=SimpleNamespace(from_external=fake.stream))
    cupy.linalg = SimpleNamespace(LinAlgError=np.linalg.LinAlgError, qr=fake.decomposition("qr"))
    cupyx.errstate = fake.errstate
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupyx", cupyx)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=1234))
    monkeypatch.setattr(cupy_, "installed", lambda package: True)
    return fake


def run_again(run, device):
    """Stand for `recorded._capture`: to replay is to run the function again, into the same memory."""
    result = run()

    def replay():
        for _ in range(2):  # what a step leaves in its inputs would be seen in its next run
            result.copy_(run())

    return result, replay
