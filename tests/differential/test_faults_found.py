"""The harness finds what is put into autokern on purpose; else its silence would say nothing."""

import warnings

import msgspec
import pytest
import scenarios  # noqa: F401
import torch
from compare import differences, references
from table import TABLE, count
from ways import enabled, session, told

from autokern.core.registry import get


def _warning(found):
    warnings.warn("a word of ours", UserWarning, stacklevel=2)
    return found


def _raising(found):
    raise KeyError("of ours")


def _bad(found):
    found = found.clone()
    with torch.no_grad():
        found[..., 0, 0] = float("nan")
    return found


WRONG = {
    "scaled": lambda k: k * (1 + 1e-4),
    "slightly scaled": lambda k: k * (1 + 3e-8),
    "detached": lambda k: k.detach(),
    "half the gradient": lambda k: (k + k.detach()) / 2,
    "warning": _warning,
    "drawing": lambda k: k + 0 * torch.rand(1).item(),
    "raising": _raising,
    "single": lambda k: k.float(),
    "unsymmetric": lambda k: k + torch.linspace(0, 1e-6, k.shape[-1], dtype=k.dtype),
    "bad": _bad,
    "asking users": lambda k: count("user code") or k,
    "moved mean": lambda moments: (moments[0] + 1e-6, moments[1]),
}
FAULTS = [
    ("kernel_matrix", "gemm", "scaled", "matrix, scaled rbf", "square: off by"),
    ("kernel_matrix", "gemm", "slightly scaled", "matrix, scaled rbf", "square: off by"),
    ("kernel_matrix", "gemm", "detached", "matrix, scaled rbf", "raised"),
    ("kernel_matrix", "gemm", "half the gradient", "matrix, scaled matern52", "by base_kernel.raw_lengthscale: off by"),
    ("kernel_matrix", "gemm", "warning", "matrix, scaled matern32", "warned"),
    ("kernel_matrix", "gemm", "drawing", "matrix, scaled rbf", "random state"),
    ("kernel_matrix", "gemm", "raising", "matrix, scaled rbf", "warned"),
    ("kernel_matrix", "gemm", "single", "matrix, scaled rbf", "float32"),
    ("kernel_matrix", "gemm", "unsymmetric", "matrix, scaled rbf", "off by"),
    ("kernel_matrix", "gemm", "bad", "matrix, scaled rbf", "not finite"),
    ("kernel_matrix", "gemm", "scaled", "matrix, scaled rbf, float32", "error"),
    ("kernel_matrix", "gemm", "asking users", "matrix, scaled rbf", "was called"),
    ("predict", "lazy", "moved mean", "a posterior, scaled rbf", "mean: off by"),
    ("predict", "lazy", "moved mean", "between predictions, outputscale setter", "mean: off by"),
]


@pytest.mark.parametrize(
    ("op", "name", "fault", "scenario", "words"), FAULTS, ids=[f"{f[2]} in {f[3]}" for f in FAULTS]
)
def test_a_wrong_candidate_is_found(op, name, fault, scenario, words, monkeypatch):
    """One candidate, wrong in one respect, is complained of in that respect, and is not without the fault."""
    subject, candidates = TABLE[scenario], get(op).candidates
    known = references(subject)

    def complaints():
        with enabled(), session(AUTOKERN_FORCE=f"{op}={name}"):
            return {text for text in differences(subject, known, told(subject)) if words in text}

    before = complaints()
    at = next(k for k, one in enumerate(candidates) if one.name == name)
    honest = candidates[at].run
    wrong = msgspec.structs.replace(candidates[at], run=lambda *args: WRONG[fault](honest(*args)))
    monkeypatch.setattr(get(op), "listed", [*candidates[:at], wrong, *candidates[at + 1 :]])
    assert complaints() - before, f"nothing was said of {fault}"


def test_stock_does_not_differ_from_itself():
    """Two runs of stock tell the same, whatever ran between them."""
    for name, scenario in [item for item in TABLE.items() if not item[1].fresh][::23]:  # not where its caches are stale
        known = references(scenario)
        assert differences(scenario, known, told(scenario)) == [], name
