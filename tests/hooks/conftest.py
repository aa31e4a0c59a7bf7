"""What the tests of replays, and those of large systems, share."""

import pytest


@pytest.fixture
def at_once(monkeypatch):
    """Losses are recorded at once, and served whatever that takes."""
    from autokern.core.replay import recording  # in here, for most tests of this folder have no need of them
    from autokern.hooks import gpytorch as hooks
    from autokern.hooks.later import repeated

    monkeypatch.setattr(hooks, "_ENOUGH", 0.0)
    monkeypatch.setattr(hooks, "_ENOUGH_VARIATIONAL", 0.0)
    monkeypatch.setattr(recording, "_IN_CACHE", 0)  # results share memory
    for name, value in {"_GAIN": float("inf"), "_histories": {}}.items():
        monkeypatch.setattr(repeated, name, value)


@pytest.fixture
def third_recorded(monkeypatch):
    """The third evaluation is recorded, and replays serve whatever they take."""
    from autokern.hooks import install, later
    from autokern.hooks.later import repeated

    later.look()
    for name, value in {"_SPENT": 0.0, "_GAIN": float("inf"), "_histories": {}}.items():
        monkeypatch.setattr(repeated, name, value)
    with install.enabled():
        yield


@pytest.fixture
def fresh():
    """No system is known, and none is left behind."""
    from autokern.density import systems

    systems._latest.clear()
    yield
    systems._latest.clear()
