"""Problem: the frozen, hashable description of a call, the key of decisions; Candidate: one way to serve it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from autokern.core.errors import interrupted
from autokern.core.state import once

if TYPE_CHECKING:
    from autokern.core.op import Op

INDUCING = "inducing"  # the word of a problem with `m` inducing points
SIZES = ("m", "n", "d", "rhs", "batch")


class Problem(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """All properties of a call that affect its running time.

    Parameters
    ----------
    op : str
        Name of the Op.
    m, n : int
        Rows and columns of the matrix; for a kernel matrix, points in ``x1`` and ``x2``.
    d, rhs, batch : int
        Input dimensions of a kernel matrix, else 0; right-hand sides (columns that the matrix multiplies), else 0; the
        product of the batch dimensions.
    dtype, device : str
        ``"float32"`` or ``"float64"``; the kind of the arguments' device: ``"cpu"``, ``"cuda"``, ...
    grad : str
        Requested gradients: empty for none, else words joined by ``/``.
    variant : str
        Further properties that affect time (kernel family, ARD, memory layout, structure): words joined by ``/``, the
        most important first.

    Examples
    --------
    >>> Problem(op="qr", m=500, n=50).n
    50
    """

    op: str
    m: int = 1
    n: int = 1
    d: int = 0
    rhs: int = 0
    batch: int = 1
    dtype: str = "float64"
    device: str = "cpu"
    grad: str = ""
    variant: str = ""

    @property
    def group(self) -> tuple[str, str, str]:
        """Op, dtype and device kind; bans and levels of calibration are kept by group."""
        return (self.op, self.dtype, self.device)

    @property
    def elements(self) -> int:
        """Entries of all ``m`` by ``n`` matrices of the batch."""
        return self.batch * self.m * self.n

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 8 if self.dtype == "float64" else 4

    @property
    def words(self) -> tuple[str, ...]:
        """The words of `variant` and `grad`, the categorical part of the problem."""
        return (*self.variant.split("/"), *(f"grad:{word}" for word in self.grad.split("/")))

    @property
    def orders(self) -> dict[str, float]:
        """Library settings that the user changed, from the words ``order:NAME=VALUE``."""
        pairs = (word.removeprefix("order:").split("=") for word in self.words if word.startswith("order:"))
        return {name: float(value) for name, value in pairs}

    @property
    def coarse(self) -> Problem:
        """The problem with m, n, d and batch rounded to four binary digits: similar sizes share a decision."""
        return self.replace(m=_cut(self.m), n=_cut(self.n), d=_cut(self.d), batch=_cut(self.batch))

    def replace(self, **changes: Any) -> Problem:
        """Return a copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    def __str__(self) -> str:
        usual = {"d": 0, "rhs": 0, "batch": 1}
        sizes = [f"{name}={size}" for name in SIZES if (size := getattr(self, name)) != usual.get(name)]
        words = filter(None, (self.dtype, self.device, self.variant, self.grad and f"grad={self.grad}"))
        return f"{self.op}({', '.join([*sizes, *words])})"


def _cut(size: int) -> int:
    """Return the middle of the sizes that agree in their first four binary digits."""
    shift = max(0, size.bit_length() - 4)
    return (size >> shift << shift) + (1 << shift >> 1)


class Features(msgspec.Struct, frozen=True):
    """Work counts of a problem, by which stock's time on the nearest measured problem is scaled."""

    calls: float = 1.0  # library calls in sequence
    flops: float = 0.0  # of matrix products and decompositions
    bytes: float = 0.0  # moved through memory by element-wise passes


ACCURACIES = ("same", "better", "approximate")

Run = Callable[..., Any]


def nothing(*_: object) -> None:
    """Return None, the default of `unsupported`, `unavailable`, `error`, `obeys` and functions that show progress."""
    return None


class Error(msgspec.Struct, frozen=True):
    """The error to expect of a candidate that may exceed its Op's bound."""

    word: str  # for a table
    words: str  # a sentence


WITHIN = Error("in bound", "")  # the error of results within their Op's bound

UNKNOWN = Error("unknown", "")


class Candidate(msgspec.Struct, frozen=True):
    """One way to compute an Op.

    ``same`` agrees with stock within the Op's bound, ``better`` is exact where stock approximates, ``approximate`` runs
    only under ``accuracy="approximate"``. `unsupported` must be pure: recorded hosts are replayed on other machines.
    """

    name: str  # unique within the Op
    run: Run  # takes the Op's arguments, returns its result
    accuracy: str = "same"  # or "better", "approximate"
    unsupported: Callable[[Problem], str | None] = nothing  # why it cannot serve a Problem on any machine, or None
    unavailable: Callable[[str], str | None] = nothing  # why it cannot run here on a kind of device, or None
    memory: Callable[[Problem], int] = lambda problem: 0  # bytes allocated at the peak, results included
    compiles: bool = False  # at its first call: measured by full calibrations, run only where it repays compiling
    threads: int = 0  # 0 for torch's; of two equally fast candidates, the one with a single thread runs
    parts: bool = False  # whether it calls other ops, which are then dispatched
    as_stock: bool = False  # it iterates as stock does; calibration does not ban it for exceeding the Op's bound
    error: Callable[[Problem], Error | None] = nothing  # the expected error; None within the Op's bound
    source: str = ""  # its plugin; empty for candidates registered beside their Op
    summary: str = ""  # one line for people

    @property
    def loose(self) -> bool:
        """Whether it is as inaccurate as stock where stock iterates."""
        return self.as_stock and self.accuracy == "same"

    @property
    def tight(self) -> bool:
        """Whether it iterates to a smaller residual than stock: its time on samples does not predict other systems."""
        return self.as_stock and self.accuracy == "better"

    def why_not(self, problem: Problem) -> str | None:
        """Return why this candidate cannot serve a problem in this process, or None if it can."""
        return self.unsupported(problem) or self.unavailable(problem.device)

    def of_plugin(self, source: str) -> Candidate:
        """Return this candidate as a plugin's: if `unsupported` or `unavailable` raises, the error is the reason."""

        def answer(field: str, about: Any) -> Any:
            try:
                return getattr(self, field)(about)
            except Exception as error:
                if interrupted(error):
                    raise
                return None if field == "error" else f"its {field} raised {type(error).__name__}: {error}"

        guards: Any = {f: functools.partial(answer, f) for f in ("unsupported", "unavailable", "error")}
        return msgspec.structs.replace(self, source=source, **guards)


class Feasibility:
    """Which candidates can serve one problem, and their memory; both are evaluated once, when first read."""

    def __init__(self, op: Op, problem: Problem) -> None:
        self.op, self.problem = op, problem
        self.candidates = tuple(op.candidates)
        self._reasons: dict[str, str | None] = {}

    def why_not(self, candidate: Candidate) -> str | None:
        """Return why a candidate cannot serve the problem, or None where it can."""
        name = candidate.name
        if name not in self._reasons:
            self._reasons[name] = candidate.why_not(self.problem)
        return self._reasons[name]

    def feasible(self) -> list[Candidate]:
        """Candidates that can serve the problem, stock first, whatever their accuracy and memory."""
        return [c for c in self.candidates if self.why_not(c) is None]

    @once
    def memory(self) -> dict[str, int]:
        """Bytes that each candidate allocates at its peak, results included, whether or not it can serve."""
        return {c.name: c.memory(self.problem) for c in self.candidates}
