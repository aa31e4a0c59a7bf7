"""What stands in for what is not there: entry points, recorded steps, a process without autokern."""

import importlib.metadata
import io
import pickle
from importlib.metadata import EntryPoint
from types import FunctionType, SimpleNamespace

import pytest

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


def run_again(run, device):
    """Stand for `recorded._capture`: to replay is to run the function again, into the same memory."""
    result = run()

    def replay():
        for _ in range(2):  # what a step leaves in its inputs would be seen in its next run
            result.copy_(run())

    return result, replay
