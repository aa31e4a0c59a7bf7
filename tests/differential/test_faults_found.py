"""The harness finds what is put into autokern on purpose; else its silence would say nothing."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import msgspec
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import scenarios  # noqa: F401
from compare import differences, references
from table import TABLE, count
from ways import enabled, session, told

from autokern.core.registry import get


def _scaled(run, *args):
    return run(*args) * (1 + 1e-4)


def _slightly(run, *args):
    return run(*args) * (1 + 3e-8)


def _detached(run, *args):
    return run(*args).detach()


def _half_the_gradient(run, *args):
    k = run(*args)
    return (k + k.detach()) / 2


def _warning(run, *args):
    warnings.warn("a word of ours", UserWarning, stacklevel=2)
    return run(*args)


def _drawing(run, *args):
    torch.rand(1)
    return run(*args)


def _raising(run, *args):
    raise KeyError("of ours")


def _single(run, *args):
    return run(*args).float()


def _unsymmetric(run, *args):
    k = run(*args)
    return k + torch.linspace(0, 1e-6, k.shape[-1], dtype=k.dtype)


def _bad(run, *args):
    k = run(*args).clone()
    with torch.no_grad():
        k[..., 0, 0] = float("nan")
    return k


def _asking_users(run, *args):
    count("user code")
    return run(*args)


def _moved_mean(run, *args):
    mean, covariance = run(*args)
    return mean + 1e-6, covariance


FAULTS = [
    ("kernel_matrix", "gemm", _scaled, "matrix, scaled rbf", "square: off by"),
    ("kernel_matrix", "gemm", _slightly, "matrix, scaled rbf", "square: off by"),
    ("kernel_matrix", "gemm", _detached, "matrix, scaled rbf", "raised"),
    ("kernel_matrix", "gemm", _half_the_gradient, "matrix, scaled matern52", "by base_kernel.raw_lengthscale: off by"),
    ("kernel_matrix", "gemm", _warning, "matrix, scaled matern32", "warned"),
    ("kernel_matrix", "gemm", _drawing, "matrix, scaled rbf", "random state"),
    ("kernel_matrix", "gemm", _raising, "matrix, scaled rbf", "warned"),
    ("kernel_matrix", "gemm", _single, "matrix, scaled rbf", "float32"),
    ("kernel_matrix", "gemm", _unsymmetric, "matrix, scaled rbf", "off by"),
    ("kernel_matrix", "gemm", _bad, "matrix, scaled rbf", "not finite"),
    ("kernel_matrix", "gemm", _scaled, "matrix, scaled rbf, float32", "error"),
    ("kernel_matrix", "gemm", _asking_users, "matrix, scaled rbf", "was called"),
    ("predict", "lazy", _moved_mean, "a posterior, scaled rbf", "mean: off by"),
    ("predict", "lazy", _moved_mean, "between predictions, outputscale setter", "mean: off by"),
]


@pytest.mark.parametrize(
    ("op", "name", "fault", "scenario", "words"), FAULTS, ids=[f"{f[2].__name__.strip('_')} in {f[3]}" for f in FAULTS]
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
    wrong = msgspec.structs.replace(candidates[at], run=lambda *args: fault(honest, *args))
    monkeypatch.setattr(get(op), "listed", [*candidates[:at], wrong, *candidates[at + 1 :]])
    assert complaints() - before, f"nothing was said of {fault.__name__}"


def test_stock_does_not_differ_from_itself():
    """Two runs of stock tell the same, whatever ran between them."""
    for name, scenario in list(TABLE.items())[::23]:
        known = references(scenario)
        assert differences(scenario, known, told(scenario)) == [], name


def test_force_is_obeyed():
    """With autokern enabled, candidates named by force are those that run."""
    from autokern.runtime import dispatch

    subject = TABLE["matrix, scaled rbf"]
    with enabled(), session(AUTOKERN_FORCE="kernel_matrix=broadcast"):
        told(subject)
        assert "broadcast" in dispatch.stats()["kernel_matrix"]
