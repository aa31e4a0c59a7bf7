"""How a call ends: its value or its error, and the warnings on the way; what two sides of a comparison share."""

import contextlib
import functools
import warnings

import torch

import autokern


def judged(judge):
    """Let what a test computes be judged: `judge` gets the computation, and the parameters of the test."""

    def decorate(compute):
        @functools.wraps(compute)
        def test(**given):
            judge(functools.partial(compute, **given), given)

        return test

    return decorate


def outcome(run, *args):
    """The value of a call, or kind and text of its error, and kind and text of each warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = run(*args)
        except Exception as error:
            found = type(error), str(error)
    return found, [(w.category, str(w.message)) for w in caught]


def assert_close(found, expected, where="", **tolerance):
    """Tensors in nested dicts and sequences, and what is no tensor, are the same."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.items()), list(expected.items())
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for k, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{where}/{other[0] if type(other) is tuple and other else k}", **tolerance)
    elif isinstance(expected, torch.Tensor):
        single = expected.dtype == torch.float32
        usual = {"rtol": 2e-3, "atol": 2e-4} if single else {"rtol": 1e-8, "atol": 1e-9}
        options = {"equal_nan": True, "msg": lambda text: f"{where}: {text}", **usual, **tolerance}
        torch.testing.assert_close(found, expected, **options)
    else:
        assert found == expected, where


def count(op, candidate=None):
    """How often a candidate has served in this session, or all of an op have."""
    counts = autokern.stats().get(op, {})
    return counts.get(candidate, 0) if candidate else sum(counts.values())


@contextlib.contextmanager
def serving(op, candidate="arrays", least=1):
    """With autokern and a candidate by force, which serves at least so often in the block, or never where that is 0."""
    with autokern.enabled(), autokern.using(force={op: candidate}):
        before = count(op, candidate)
        yield
        found = count(op, candidate) - before
    assert found >= least if least else not found, f"{op}: {candidate} has served {found} times"


def both(run):
    """What a function returns without and with autokern."""
    expected = run()
    with autokern.enabled():
        return expected, run()


def as_stock(**tolerance):
    """Let a test return the same with autokern as without."""
    return judged(lambda run, _: assert_close(*reversed(both(run)), **tolerance))
