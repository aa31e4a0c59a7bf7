"""How a call ends: its value or its error, and the warnings on the way; what two sides of a comparison share."""

from __future__ import annotations

import functools
import warnings


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
