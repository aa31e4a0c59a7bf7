"""Kin: how far measurements on one host hold on another.

They tell which ratios to expect before anything is measured here. How much they tell is the likeness of the two hosts,
by the rules below.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from typing import Any

__all__ = ["LEAST", "likeness", "table"]

LEAST = 0.05
"""Likeness below which a profile tells nothing."""

Fields = dict[str, Any]

_FACTORS = {
    "os": (0.9, "another operating system"),
    "machine": (0.3, "another architecture (x86_64, aarch64)"),
    "vendor": (0.6, "CPU of another vendor"),
    "capability": (0.6, "another instruction set in use (AVX2, AVX512)"),
    "simd": (0.75, "no extension of the instruction set in common; some in common: in proportion"),
    "series": (0.85, "another family or model of the same vendor"),
    "stepping": (0.97, "another stepping, or another name with the same numbers"),
    "threads": (0.7, "each octave of the number of threads"),
    "blas": (0.5, "another BLAS library"),
    "blas_version": (0.95, "another version of it"),
    "torch_major": (0.7, "another major version of torch"),
    "torch": (0.97, "each minor version of torch, for ten at most"),
    "build": (0.99, "another patch or build of torch"),
    "library": (0.98, "each of gpytorch, linear_operator, oneDNN and OpenMP in another version"),
    "gpu_vendor": (0.3, "GPU of another vendor"),
    "gpu_capability": (0.5, "GPU of another compute capability or architecture"),
    "gpu": (0.8, "another GPU, or another slice, of the same capability"),
    "processors": (0.7, "each octave of the number of its multiprocessors"),
    "cuda": (0.85, "another major version of CUDA or ROCm"),
    "driver": (0.98, "each of driver, cuDNN and the minor version of CUDA or ROCm in another version"),
}
"""Factors of likeness for what differs, and their meanings."""

_OF_GPU = ("gpu_vendor", "gpu_capability", "gpu", "processors", "cuda", "driver")
_VENDORS = re.compile(r"amd|intel|apple|ampere|neoverse|graviton|power|nvidia", re.IGNORECASE)
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def table() -> str:
    """Return the rules of likeness as a Markdown table, as in `docs/how-it-decides.md`."""
    rows = [
        f"| {meaning} | {'GPU' if name in _OF_GPU else 'both'} | {factor:g} |"
        for name, (factor, meaning) in _FACTORS.items()
    ]
    return "\n".join(["| what differs | data on | factor |", "|---|---|---|", *rows])


def likeness(one: Fields, other: Fields, device: str = "cpu") -> float:
    """Return how far measurements on one host hold on another: 1 for equal hosts, 0 where they tell nothing.

    The factors of `table` are multiplied for everything that differs. What only one host tells counts half (the square
    root of the factor). For data on a GPU the CPU counts little (the fourth root of its factors). Python does not
    count.

    Parameters
    ----------
    one, other : dict
        Fields of the hosts, as `Host.fields` gives them; keys may be missing.
    device : str
        Kind of the device that holds the data; a host without it tells nothing.

    Examples
    --------
    >>> host = {"cpu": {"capability": "AVX512", "threads": 2}}
    >>> likeness(host, host), round(likeness(host, {"cpu": {"capability": "AVX512", "threads": 4}}), 2)
    (1.0, 0.7)
    """
    if not (_section(one, "cpu") and _section(other, "cpu")):
        return 0.0
    software, processor = _software(one, other), _processor(one, other)
    if device == "cpu":
        return software * processor
    pairs = itertools.product(_devices(one, device), _devices(other, device))
    return max((software * _gpu(a, b) * _toolkit(one, other) * processor**0.25 for a, b in pairs), default=0.0)


def _processor(one: Fields, other: Fields) -> float:
    """Return the factor of the CPU, its BLAS and its threads."""
    system, there = _section(one, "system"), _section(other, "system")
    cpu, versions = (
        (_section(one, "cpu"), _section(other, "cpu")),
        (_section(one, "versions"), _section(other, "versions")),
    )
    machines = [_MACHINES.get(name, name) for name in (_text(s, "machine").lower() for s in (system, there))]
    factor = _unlike("os", _text(system, "os"), _text(there, "os")) * _unlike("machine", *machines)
    factor *= _unlike("capability", *(_text(c, "capability") for c in cpu)) * _extensions(*cpu) * _model(*cpu)
    factor *= _octaves("threads", *(_count(c, "threads") for c in cpu))
    libraries = [_text(v, "blas") for v in versions]
    factor *= _unlike("blas", *libraries)
    if libraries[0] == libraries[1]:
        name = "mkl" if libraries[0] == "mkl" else "openblas"
        factor *= _unlike("blas_version", *(_text(v, name) for v in versions))
    return factor


def _extensions(one: Fields, other: Fields) -> float:
    """Return the factor of instruction-set extensions: by the share in common."""
    here, there = _words(one, "simd"), _words(other, "simd")
    if here == there:
        return 1.0
    least = _FACTORS["simd"][0]
    if not (here and there):
        return math.sqrt(least)
    return least + (1 - least) * len(here & there) / len(here | there)


def _model(one: Fields, other: Fields) -> float:
    """Return the factor of vendor, family, model and stepping."""
    vendors = _vendor(one), _vendor(other)
    if vendors[0] != vendors[1]:
        return _unlike("vendor", *vendors)
    numbers, names = (_text(one, "numbers"), _text(other, "numbers")), (_text(one, "model"), _text(other, "model"))
    if not all(numbers):
        return _unlike("series", *names)
    if numbers[0].split("-")[:2] != numbers[1].split("-")[:2]:
        return _FACTORS["series"][0]
    return _unlike("stepping", f"{numbers[0]} {names[0]}", f"{numbers[1]} {names[1]}")


def _vendor(cpu: Fields) -> str:
    """Return the implementer of an ARM CPU, or the vendor in the name of another."""
    numbers = _text(cpu, "numbers")
    if numbers.startswith("0x"):
        return numbers.partition("-")[0]
    found = _VENDORS.search(_text(cpu, "model"))
    return found[0].lower() if found else ""


def _software(one: Fields, other: Fields) -> float:
    """Return the factor of torch and the libraries of Gaussian processes."""
    versions = _section(one, "versions"), _section(other, "versions")
    here, there = (_text(v, "torch") for v in versions)
    numbers, others = _numbers(here), _numbers(there)
    if here == there:
        factor = 1.0
    elif not (numbers and others):
        factor = math.sqrt(_FACTORS["torch"][0])
    elif numbers[0] != others[0]:
        factor = _FACTORS["torch_major"][0]
    elif numbers[1] != others[1]:
        factor = _FACTORS["torch"][0] ** min(abs(numbers[1] - others[1]), 10)
    else:
        factor = _FACTORS["build"][0]
    for name in ("gpytorch", "linear_operator", "onednn", "openmp"):
        factor *= _unlike("library", *(_text(v, name) for v in versions))
    return factor


def _gpu(one: Fields, other: Fields) -> float:
    """Return the factor of two accelerators of one kind."""
    if one == other:
        return 1.0
    makers = _maker(one), _maker(other)
    factor = _unlike("gpu_vendor", *makers) * _unlike("driver", _text(one, "driver"), _text(other, "driver"))
    if makers[0] == makers[1]:
        chips = [_text(gpu, "architecture") or _text(gpu, "capability") for gpu in (one, other)]
        if chips[0] != chips[1]:
            factor *= _unlike("gpu_capability", *chips)
        else:
            factor *= _unlike("gpu", _text(one, "name"), _text(other, "name"))
    return factor * _octaves("processors", _count(one, "processors"), _count(other, "processors"))


def _maker(gpu: Fields) -> str:
    """Return the vendor of an accelerator: only AMD's have an architecture beside their numbers."""
    found = _VENDORS.search(_text(gpu, "name"))
    return "amd" if _text(gpu, "architecture") else found[0].lower() if found else _text(gpu, "name").split(" ")[0]


def _toolkit(one: Fields, other: Fields) -> float:
    """Return the factor of the libraries of an accelerator."""
    versions = _section(one, "versions"), _section(other, "versions")
    here, there = (_text(v, "cuda") or _text(v, "hip") for v in versions)
    major = here.partition(".")[0], there.partition(".")[0]
    factor = _unlike("cuda", *major) if major[0] != major[1] else _unlike("driver", here, there)
    return factor * _unlike("driver", *(_text(v, "cudnn") for v in versions))


def _unlike(name: str, one: str, other: str) -> float:
    """Return 1 for equal texts, the factor of a rule for others, and its square root where one of them is missing."""
    factor = _FACTORS[name][0]
    return 1.0 if one == other else factor if one and other else math.sqrt(factor)


def _octaves(name: str, one: int, other: int) -> float:
    """Return the factor of a rule to the power of the octaves between two numbers; half an octave if one is missing."""
    octaves = abs(math.log2(one) - math.log2(other)) if one and other else 0.0 if one == other else 0.5
    return float(_FACTORS[name][0] ** octaves)


def _numbers(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d{1,6})\.(\d{1,6})", version)
    return (int(found[1]), int(found[2])) if found else None


def _section(fields: Fields, name: str) -> Fields:
    found = fields.get(name)
    return found if isinstance(found, dict) else {}


def _text(fields: Fields, name: str) -> str:
    found = fields.get(name)
    return found if isinstance(found, str) else ""


def _count(fields: Fields, name: str) -> int:
    found = fields.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 < found <= 2**40 else 0


def _words(fields: Fields, name: str) -> frozenset[str]:
    found = fields.get(name)
    return frozenset(word for word in found if isinstance(word, str)) if isinstance(found, Iterable) else frozenset()


def _devices(fields: Fields, kind: str) -> list[Fields]:
    found = fields.get("accelerators")
    there = found if isinstance(found, list) else []
    return [gpu for gpu in there if isinstance(gpu, dict) and gpu.get("kind") == kind]
