"""Problem: the frozen, hashable description of a call, the key of measurements and decisions."""

from __future__ import annotations

from typing import Any

import msgspec

SIZES = ("m", "n", "d", "rhs", "batch")


class Problem(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """All properties of a call that affect its running time.

    Parameters
    ----------
    op : str
        Name of the Op.
    m, n : int
        Rows and columns of the matrix; for a kernel matrix, points in ``x1`` and ``x2``.
    d : int
        Input dimensions of a kernel matrix, else 0.
    rhs : int
        Right-hand sides (columns that the matrix multiplies), else 0.
    batch : int
        Product of the batch dimensions.
    dtype : str
        ``"float32"`` or ``"float64"``.
    device : str
        Kind of the arguments' device: ``"cpu"``, ``"cuda"``, ...
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
        """The problem with sizes rounded to four binary digits, so that a slowly growing size keeps one problem."""
        return self.replace(m=_cut(self.m), n=_cut(self.n), d=_cut(self.d), batch=_cut(self.batch))

    @property
    def family(self) -> str:
        """All properties but `m` and `n`, in words."""
        words = [self.variant, f"gradient of {self.grad}" if self.grad else ""]
        words += [f"{self.batch} matrices"] if self.batch != 1 else []
        words += [f"{name}={getattr(self, name)}" for name in ("d", "rhs") if getattr(self, name)]
        return ", ".join(filter(None, (f"{self.op} on {self.device} in {self.dtype}", *words)))

    def replace(self, **changes: Any) -> Problem:
        """Return a copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    def __str__(self) -> str:
        sizes = [f"{name}={getattr(self, name)}" for name in ("m", "n")]
        sizes += [f"{name}={getattr(self, name)}" for name in ("d", "rhs") if getattr(self, name)]
        if self.batch != 1:
            sizes.append(f"batch={self.batch}")
        extras = [self.dtype, self.device]
        if self.variant:
            extras.append(self.variant)
        if self.grad:
            extras.append(f"grad={self.grad}")
        return f"{self.op}({', '.join(sizes + extras)})"


def _cut(size: int) -> int:
    """Return the middle of the sizes that agree in their first four binary digits."""
    shift = max(0, size.bit_length() - 4)
    return (size >> shift << shift) + (1 << shift >> 1)


class Features(msgspec.Struct, frozen=True):
    """Work counts of a problem, by which stock's time on the nearest measured problem is scaled."""

    calls: float = 1.0  # library calls in sequence
    flops: float = 0.0  # of matrix products and decompositions
    bytes: float = 0.0  # moved through memory by element-wise passes
