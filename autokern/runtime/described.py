"""Described: the variant and the gradients of a problem as a user gives them, completed and checked.

A problem that never occurs would be answered from measurements of others, and its answer would mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from autokern.core.errors import SettingsError
from autokern.core.op import Op
from autokern.core.problem import Problem
from autokern.gp.library_orders import ROWS
from autokern.kernels.family import families
from autokern.ops._state_space import LINE

_ORDERS = [row.name for row in ROWS]
_GRADS = {"a", "rhs", "theta", "x"}


def known(op: Op, measured: Iterable[Problem]) -> list[Problem]:
    """Return problems of an op: those of its grids, and those that were measured."""
    grids = [problem for level in ("quick", "full") for problem in op.grid(level, "float64", "cpu")]
    return [*grids, *(problem for problem in measured if problem.op == op.name)]


def words(op: Op, grad: str, there: Iterable[Problem]) -> None:
    """Check which gradients are wanted.

    Raises SettingsError for a word that stands for no gradient.
    """
    usual = {word for problem in there for word in problem.grad.split("/") if word}
    for word in filter(None, grad.split("/")):
        if word not in usual | _GRADS:
            raise SettingsError(f"grad {word!r} was asked for; {op.name} knows {', '.join(sorted(usual)) or 'none'}")


def variant(op: Op, given: str, usual: str, there: Iterable[Problem]) -> str:
    """Complete a variant: what it leaves out is as in the usual one of such a size. Orders come last.

    Raises SettingsError for a word that no problem of the op has.
    """
    given, orders = _without_orders(given)
    variants = {problem.variant for problem in there}
    if given in variants:
        return given + orders
    places = {part: k for text in variants for k, word in enumerate(text.split("/")) for part in word.split("+")}
    if "rbf" in places:  # a sum of any families
        names = {"constant", "linear", "mixture", "polynomial", *(family.name for family in families(shaped=True))}
        places |= dict.fromkeys(names - places.keys(), places["rbf"])
    found = usual.split("/")
    places |= {LINE: len(found)} if "state-space" in op.names() else {}
    for word in filter(None, given.split("/")):
        at = {places.get(part) for part in word.split("+")}
        place = at.pop()
        if at or place is None or place > len(found):
            usual_words = sorted(places, key=lambda part: (places[part], part)) if variants != {""} else ["none"]
            raise SettingsError(f"variant {word!r} was asked for; {op.name} knows {', '.join(usual_words)}")
        found[place : place + 1] = ["+".join(sorted(word.split("+")))]
    return "/".join(found) + orders


def _without_orders(given: str) -> tuple[str, str]:
    """Return a variant without the user's orders to the libraries, and those."""
    plain, orders = [], ""
    for word in given.split("/"):
        name, equals, value = word.removeprefix("order:").partition("=")
        if not word.startswith("order:"):
            plain.append(word)
        elif name in _ORDERS and equals and value.replace(".", "", 1).replace("e-", "", 1).isdigit():
            orders += f"/{word}"
        else:
            raise SettingsError(f"variant {word!r} was asked for; an order is NAME=NUMBER of {', '.join(_ORDERS)}")
    return "/".join(plain), orders
