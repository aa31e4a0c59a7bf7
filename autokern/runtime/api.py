"""Public functions that report decisions and measurements: explain, profile, op."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Any

import msgspec

from autokern import ops as _ops  # noqa: F401  (importing it registers every Op)
from autokern.core import known, releases
from autokern.core.decision import Decision
from autokern.core.errors import SettingsError
from autokern.core.op import Op
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.core.shown import Shown
from autokern.core.units import legible
from autokern.gp.library_orders import ROWS
from autokern.kernels.family import families
from autokern.runtime import dispatch
from autokern.tuning.profile import Profile


def profile() -> Profile:
    """Return the profile in use: the measurements of this machine, or those that ``AUTOKERN_PROFILE`` names.

    Returns
    -------
    Profile
        Timings of candidates in seconds; empty before the first measurement.

    Raises
    ------
    ProfileError
        If ``AUTOKERN_PROFILE`` names an unreadable or invalid file and ``AUTOKERN_STRICT`` is set; without the latter,
        one warning is shown and the profile is empty.

    Examples
    --------
    >>> isinstance(autokern.profile(), autokern.Profile)
    True
    """
    return dispatch.session().profile


def op(name: str) -> Op:
    """Return an Op by its name.

    Parameters
    ----------
    name : str
        A name that `autokern show` and the docs list.

    Raises
    ------
    SettingsError
        If there is no such op.

    Examples
    --------
    >>> autokern.op("qr").names()[0]
    'stock'
    """
    return get(name)


class Explanation(Shown, msgspec.Struct, frozen=True):
    """The decisions of this process; prints as a table.

    Parameters
    ----------
    decisions : list
        Pairs of a Decision and the number of calls that it served.
    """

    decisions: list[tuple[Decision, int]]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        off = releases.summary(known.unknown())
        if not self.decisions:
            return "\n".join(filter(None, ["autokern has taken no decision in this process", off]))
        rows = [("calls", "problem", "runs", "x stock", "why")]
        for decision, calls in sorted(self.decisions, key=lambda pair: -pair[1]):
            rows.append((str(calls), str(decision.problem), decision.candidate, f"{decision.margin:.2f}", decision.why))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = (
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
        )
        return legible("\n".join(filter(None, [*lines, off])))


def explain(op: str | None = None, **fields: Any) -> Decision | Explanation:
    """Return the candidate that would run for a problem, and why; without arguments, all decisions of this process.

    Parameters
    ----------
    op : str, optional
        Name of an op.
    **fields
        Fields of the Problem: ``m``, ``n``, ``d``, ``rhs``, ``batch``, ``dtype``, ``device``, ``grad``, ``variant``.

    Returns
    -------
    Decision or Explanation
        Times in seconds, memory in bytes; ``print`` shows a table.

    Raises
    ------
    SettingsError
        For an unknown op or field, or a value that is out of range.

    Examples
    --------
    >>> decision = autokern.explain("qr", m=500, n=50)
    >>> decision.problem.n, decision.candidate in autokern.op("qr").names()
    (50, True)
    """
    return Explanation(dispatch.decisions()) if op is None else dispatch.explain(problem(op, **fields))


def problem(op: str, **fields: Any) -> Problem:
    """Return the Problem of the given fields; the others come from the op's first grid problem, or its nearest size."""
    allowed = [name for name in Problem.__struct_fields__ if name != "op"]
    unknown = sorted(set(fields) - set(allowed))
    if unknown:
        raise SettingsError(f"a problem has no {unknown[0]!r}; give {', '.join(allowed)}")
    fields = {name: value for name, value in fields.items() if value is not None}
    for name in ("dtype", "device"):
        if name in fields:
            fields[name] = str(fields[name]).removeprefix("torch.").partition(":")[0]
    dtype = fields.setdefault("dtype", "float64")
    if dtype not in ("float32", "float64"):
        raise SettingsError(f"dtype {dtype!r} was asked for; autokern serves float32 and float64")
    for name in ("m", "n", "d", "rhs", "batch"):
        size = fields.get(name, 0)
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise SettingsError(f"{name}={size!r} was asked for; sizes are whole numbers, 0 or more")
    for name in ("grad", "variant"):
        if not isinstance(fields.get(name, ""), str):
            raise SettingsError(f"{name}={fields[name]!r} was asked for; it is text, as `autokern show` tells it")
    for one, other in (("m", "n"), ("n", "m")):
        if one in fields:
            fields.setdefault(other, fields[one])
    grid = get(op).grid("quick", dtype, fields.get("device", "cpu")) or get(op).grid("quick", "float64", "cpu")
    usual = grid[0]
    if get(op).composite and fields.get("n"):  # stock's algorithm depends on the size
        usual = min((p for p in grid if p.batch == 1), key=lambda p: abs(math.log(p.n / fields["n"])))
    there = [*get(op).grid("full", "float64", "cpu"), *grid]
    there += [trial.problem for trial in profile().trials if trial.problem.op == op]
    plain, orders = _without_orders(fields.get("variant", ""))
    fields["variant"] = "/".join([plain or usual.variant, *orders]).strip("/")
    gradients = {word for p in there for word in p.grad.split("/") if word}
    _check("grad", op, fields.get("grad", "").split("/"), gradients, gradients | {"", "a", "rhs", "theta", "x"})
    variants = {p.variant for p in there} - {""}
    unheard = [] if _form(plain) in {"", *map(_form, variants)} else [plain]
    _check("variant", op, unheard, variants, ())
    without = any(not p.grad for p in grid)  # whether the op serves calls that want no gradients
    return usual.replace(**{"grad": "" if without else usual.grad, **fields})


def _check(field: str, op: str, asked: Iterable[str], known: Iterable[str], allowed: Container[str]) -> None:
    """Refuse words that no problem has: the answer would come from measurements of other problems."""
    for word in asked:
        if word not in allowed:
            told = ", ".join(sorted(known)) or "none"
            raise SettingsError(f"{field} {word!r} was asked for; {op} knows {told}")


def _form(variant: str) -> str:
    """Return a variant in which the sum of families, if any, is the word ``families``."""
    first, *rest = variant.split("/")
    names = {"constant", "linear", "mixture", "polynomial", *(family.name for family in families(shaped=True))}
    return "/".join(["families" if {*first.split("+")} <= names else first, *rest])


def _without_orders(given: str) -> tuple[str, list[str]]:
    """Split a variant into itself without the user's library orders, and these orders."""
    names, words = [row.name for row in ROWS], given.split("/")
    orders = [word for word in words if word.startswith("order:")]
    for order in orders:
        name, _, value = order.removeprefix("order:").partition("=")
        if name not in names or not value.replace(".", "", 1).replace("e-", "", 1).isdigit():
            raise SettingsError(f"variant {order!r} was asked for; an order is NAME=NUMBER of {', '.join(names)}")
    return "/".join(word for word in words if word not in orders), orders
