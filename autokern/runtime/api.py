"""Public functions that report decisions and measurements: explain, profile, op."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from autokern import ops as _ops  # noqa: F401  (importing it registers every Op)
from autokern.core.decision import Decision, overall
from autokern.core.errors import SettingsError
from autokern.core.op import Op
from autokern.core.output import Shown, legible
from autokern.core.problem import SIZES, Problem
from autokern.core.registry import get
from autokern.core.releases import known
from autokern.kernels.family import families
from autokern.model.libraries import ROWS
from autokern.runtime import dispatch
from autokern.tuning.profile import Profile

_DTYPES = ("float32", "float64")
_INDENT, _NO_BREAK = 21 * " ", "\u00a0"
_ALLOWED = (
    "sizes are whole numbers, 0 or more; grad and variant are text, as `autokern show` tells it; "
    f"dtypes are {' and '.join(_DTYPES)}"
)


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


class Group(NamedTuple):
    """The decisions of one op for one candidate and reason, in words."""

    calls: int
    gain: str  # predicted time of stock over the candidate's, from least to largest; a dash where it is not known
    ran: str  # op and candidate, indented by no-break spaces for calls within composite calls
    sizes: str
    why: str
    pairs: list[tuple[Decision, int]]


def grouped(decisions: Iterable[tuple[Decision, int]]) -> list[Group]:
    """Return the decisions by op, candidate and reason, most calls first; parts follow the composite op around them."""
    of: dict[tuple[tuple[str, ...], str, str, str], list[tuple[Decision, int]]] = {}
    for d, calls in decisions:
        of.setdefault((d.within, d.problem.op, d.candidate, d.reason), []).append((d, calls))
    found: dict[tuple[str, ...], list[Group]] = {}
    for (within, name, candidate, reason), pairs in of.items():
        kinds = [decision for decision, _ in pairs]
        known_ones = [d.margin for d in kinds if d.source != "unmeasured" or candidate == "stock"]
        gain = _range([f"{margin:.2f}" for margin in sorted(known_ones)]) if known_ones else "–"
        solves = overall(solved for decision in kinds for solved in decision.solved)
        why = reason if solves is None else f"{reason}; {solves}"
        calls, ran = sum(count for _, count in pairs), f"{len(within) * 2 * _NO_BREAK}{name} by {candidate}"
        found.setdefault(within, []).append(Group(calls, gain, ran, _sizes([d.problem for d in kinds]), why, pairs))

    def following(within: tuple[str, ...]) -> Iterator[Group]:
        for group in sorted(found.pop(within, ()), key=lambda group: -group.calls):
            yield group
            yield from following((*within, group.ran.strip()))

    rows = list(following(()))
    while found:  # the composite call is no longer kept
        rows += following(min(found))
    return rows


def _range(ordered: Sequence[str]) -> str:
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]}–{ordered[-1]}"


def _sizes(problems: Sequence[Problem]) -> str:
    """Return the range of each size, and the words if there are few."""
    parts, problems = [], [problem for problem in problems if problem != Problem(op=problem.op)]
    for size in SIZES if problems else ():
        values = sorted({getattr(problem, size) for problem in problems})
        if values[-1] > (size == "batch") and not (size == "m" and all(p.m == p.n for p in problems)):
            parts.append(f"{size} {_range([f'{value:,}' for value in values])}")
    for word in ("dtype", "device", "variant"):
        words = sorted({getattr(problem, word) for problem in problems} - {""})
        parts += [" and ".join(words)] if len(words) in (1, 2) else [f"{len(words)} {word}s"] if words else []
    return ", ".join(parts)


class Explanation(Shown, msgspec.Struct, frozen=True):
    """The decisions of this process; prints as a table by op, candidate and reason. `to_frame` has each of them.

    Parameters
    ----------
    decisions : list
        Pairs of a Decision and the number of calls that it served.
    """

    decisions: list[tuple[Decision, int]]

    def __str__(self) -> str:
        lines = ["autokern has taken no decision in this process"]
        if self.decisions:
            lines = [f"{'calls':>8}  {'× stock':>9}  what ran, on what, and why"]
        for group in grouped(self.decisions):
            ran = ": ".join(filter(None, (group.ran, group.sizes)))
            lines += textwrap.wrap(f"{group.calls:>8,}  {group.gain:>9}  {ran}", 80, subsequent_indent=_INDENT)
            lines += textwrap.wrap(group.why, 80, initial_indent=_INDENT, subsequent_indent=_INDENT)
        return legible("\n".join(filter(None, [*lines, replayed(), known.summary(known.unknown())])))

    __repr__ = __str__


def replayed() -> str:
    """Return a sentence on the evaluations that this process has replayed, empty if it has replayed none."""
    count = dispatch.stats().get("optimised function", {}).get("replay", 0)
    words = "evaluations of losses and acquisition functions were replayed; they made none of the calls above"
    return f"{count:,} {words}." if count else ""


def explain(op: str | None = None, **fields: Any) -> Decision | Explanation:
    """Return the decision on a problem, or all decisions of this process."""
    return Explanation(dispatch.decisions()) if op is None else dispatch.explain(problem(op, **fields))


def problem(op: str, **fields: Any) -> Problem:
    """Return the Problem of the given fields; the others are those of the op's first grid problem, or the nearest."""
    allowed = [name for name in Problem.__struct_fields__ if name != "op"]
    fields = {"dtype": "float64", **{name: value for name, value in fields.items() if value is not None}}
    for name in {"dtype", "device"} & fields.keys():
        fields[name] = str(fields[name]).removeprefix("torch.").partition(":")[0]
    for name, value in fields.items():
        if name not in allowed:
            raise SettingsError(f"a problem has no {name!r}; give {', '.join(allowed)}")
        size = name in SIZES and type(value) is int and value >= 0
        if not size and (name in SIZES or not isinstance(value, str) or (name == "dtype" and value not in _DTYPES)):
            raise SettingsError(f"{name}={value!r} was asked for; {_ALLOWED}")
    for one, other in (("m", "n"), ("n", "m")):
        if one in fields:
            fields.setdefault(other, fields[one])
    kind = get(op)
    grid = kind.grid("quick", fields["dtype"], fields.get("device", "cpu")) or kind.grid("quick", "float64", "cpu")
    usual = grid[0]
    if kind.composite and fields.get("n"):  # stock's algorithm depends on the size
        usual = min((p for p in grid if p.batch == 1), key=lambda p: abs(math.log(p.n / fields["n"])))
    there = [*kind.grid("full", "float64", "cpu"), *grid]
    there += [trial.problem for trial in profile().trials if trial.problem.op == op]
    plain, *orders = f"/{fields.get('variant', '')}".split("/order:")
    plain = plain.strip("/") or usual.variant
    names = [row.name for row in ROWS]
    for order in orders:
        name, _, value = order.partition("=")
        if name not in names or not value.replace(".", "", 1).replace("e-", "", 1).isdigit():
            raise SettingsError(f"variant 'order:{order}' was asked for; an order is NAME=NUMBER of {', '.join(names)}")
    gradients, variants = {word for p in there for word in p.grad.split("/")}, {p.variant for p in there}
    strange = [w for w in fields.get("grad", "").split("/") if w not in {*gradients, "", "a", "rhs", "theta", "x"}]
    unheard = [] if _form(plain) in {_form(p.variant) for p in (usual, *there)} else [plain]
    for field, words, heard in (("grad", strange, gradients), ("variant", unheard, variants)):
        if words:  # the answer would come from measurements of other problems
            told = ", ".join(sorted(heard - {""})) or "none"
            raise SettingsError(f"{field} {words[0]!r} was asked for; {op} knows {told}")
    fields["variant"] = "/order:".join([plain, *orders]).removeprefix("/")
    without = any(not p.grad for p in grid)  # whether the op serves calls that want no gradients
    return usual.replace(**{"grad": "" if without else usual.grad, **fields})


def _form(variant: str) -> str:
    """Return a variant in which the sum of families, if any, is the word ``families``."""
    first, *rest = variant.split("/")
    from autokern.model.kernel_parts import FAMILIES

    names = FAMILIES - {""} | {family.name for family in families(shaped=True)}
    return "/".join(["families" if {*first.split("+")} <= names else first, *rest])
