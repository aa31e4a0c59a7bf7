"""kin.py: likeness of hosts by stated rules, and the profiles that may serve as priors, whatever lies beside them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from autokern.tuning.kin import likeness
from hypothesis import given
from hypothesis import strategies as st

from autokern.system.host import fingerprint_of
from autokern.tuning import kin, store

ROOT = Path(__file__).parents[2]
RECORDED = [store.read_file(path) for path in sorted((ROOT / "calibration" / "hosts").glob("*.json"))]

CPU = {
    "model": "AMD EPYC 7763",
    "numbers": "25-1-1",
    "simd": ["avx", "avx2", "fma", "sse4_2"],
    "capability": "AVX2",
    "physical": 8,
    "logical": 16,
    "threads": 8,
    "torch_threads": 8,
}
VERSIONS = {"python": "3.11", "torch": "2.13.0+cpu", "gpytorch": "1.15.2", "linear_operator": "0.6.1", "cuda": "12.6"}
VERSIONS |= {"blas": "mkl", "lapack": "mkl", "mkl": "2024.2-Product", "onednn": "3.12.0", "openmp": "201511"}
H100 = {"kind": "cuda", "name": "NVIDIA H100", "capability": "9.0", "architecture": "", "processors": 132}
H100 |= {"memory_mib": 81_000, "driver": "550.1"}
FIELDS = {
    "system": {"os": "Linux", "machine": "x86_64"},
    "versions": VERSIONS,
    "cpu": CPU,
    "accelerators": [H100],
    "remarks": {"autokern": "0.1.0", "memory_gib": 60.0},
}
A100 = {**H100, "name": "NVIDIA A100", "capability": "8.0", "processors": 108}
SLICE = {**H100, "name": "NVIDIA H100 MIG 3g", "processors": 66}
MI300 = {**H100, "name": "AMD Instinct MI300X", "architecture": "gfx942", "capability": "9.4"}
ARM = {"model": "aarch64", "numbers": "0x41-0xd40-0x1", "simd": ["asimd", "sve"], "capability": "DEFAULT", "threads": 8}
GONE = object()


def changed(path: str, value: object, base: dict = FIELDS) -> dict:
    found = copy.deepcopy(base)
    *sections, name = path.split(".")
    section = found
    for key in sections:
        section = section[key]
    if value is GONE:
        del section[name]
    else:
        section[name] = value
    return found


# --- likeness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "factor"),
    [
        ("versions.python", "3.14", 1),
        ("remarks", {}, 1),
        ("cpu.physical", 64, 1),
        ("versions.cuda", "13.0", 1),  # a CPU has no part in it
        ("accelerators", [], 1),
        ("system.os", "Windows", 0.9),
        ("system.machine", "AMD64", 1),
        ("system.machine", "aarch64", 0.3),
        ("cpu.model", "Intel(R) Xeon(R) Processor", 0.6),
        ("cpu.model", "AMD EPYC 7543", 0.97),
        ("cpu.model", "a processor", 0.6**0.5),
        ("cpu.numbers", "25-1-2", 0.97),
        ("cpu.numbers", "25-17-1", 0.85),
        ("cpu.capability", "AVX512", 0.6),
        ("cpu.capability", GONE, 0.6**0.5),
        ("cpu.simd", ["avx", "avx2", "fma", "sse4_2"][::-1], 1),
        ("cpu.simd", ["avx", "avx2"], 0.875),
        ("cpu.simd", ["asimd"], 0.75),
        ("cpu.simd", [], 0.75**0.5),
        ("cpu.threads", 4, 0.7),
        ("cpu.threads", 16, 0.7),
        ("cpu.threads", 64, 0.7**3),
        ("cpu.threads", GONE, 0.7**0.5),
        ("versions.blas", "open", 0.5),
        ("versions.mkl", "2023.1", 0.95),
        ("versions.mkl", GONE, 0.95**0.5),
        ("versions.torch", "2.13.1+cpu", 0.99),
        ("versions.torch", "2.13.0+cu126", 0.99),
        ("versions.torch", "2.12.0", 0.97),
        ("versions.torch", "2.11.1", 0.97**2),
        ("versions.torch", "3.0.0", 0.7),
        ("versions.torch", "unknown", 0.97**0.5),
        ("versions.torch", GONE, 0.97**0.5),
        ("versions.gpytorch", "1.16", 0.98),
        ("versions.openmp", "202011", 0.98),
        ("cpu", {}, 0),
        ("cpu", GONE, 0),
        ("cpu", "AMD", 0),
        ("system", GONE, (0.9 * 0.3) ** 0.5),
        ("versions", GONE, (0.5 * 0.97 * 0.98**4) ** 0.5),
    ],
)
def test_each_difference_has_its_factor(path, value, factor):
    other = changed(path, value)
    assert likeness(FIELDS, other) == pytest.approx(factor)
    assert likeness(other, FIELDS) == pytest.approx(factor)
    assert likeness(other, other) == (1 if factor else 0)


@pytest.mark.parametrize(
    ("path", "value", "factor"),
    [
        ("accelerators", [], 0),
        ("accelerators", GONE, 0),
        ("accelerators", "H100", 0),
        ("accelerators", [{**H100, "kind": "xpu"}], 0),
        ("accelerators", [A100], 0.5 * 0.7 ** (0.28950661719)),
        ("accelerators", [A100, H100], 1),  # the most alike of several
        ("accelerators", [SLICE], 0.8 * 0.7),
        ("accelerators", [MI300], 0.3),
        ("accelerators", [{**H100, "driver": "560.2"}], 0.98),
        ("accelerators", [{"kind": "cuda"}], (0.3 * 0.98 * 0.7) ** 0.5),
        ("versions.cuda", "12.4", 0.98),
        ("versions.cuda", "13.0", 0.85),
        ("versions.cuda", GONE, 0.85**0.5),
        ("versions.torch", "2.12.0", 0.97),
        ("cpu.threads", 4, 0.7**0.25),
        ("cpu.model", "Intel(R) Xeon(R) Processor", 0.6**0.25),
        ("cpu", GONE, 0),
    ],
)
def test_data_on_a_gpu_depend_on_the_gpu(path, value, factor):
    other = changed(path, value)
    assert likeness(FIELDS, other, "cuda") == pytest.approx(factor)
    assert likeness(other, FIELDS, "cuda") == pytest.approx(factor)


def test_the_nearer_relative_is_more_alike():
    versions = {**VERSIONS, "blas": "open", "openblas": "0.3.30"}
    arm = {**FIELDS, "cpu": ARM, "system": {"os": "Linux", "machine": "aarch64"}, "versions": versions}
    older, half = changed("versions.torch", "2.11.0"), changed("cpu.threads", 4)
    intel = changed("cpu.model", "Intel(R) Xeon(R) Gold 6338")
    order = [likeness(FIELDS, other) for other in (FIELDS, older, half, intel, arm)]
    assert order == sorted(order, reverse=True)
    assert len(set(order)) == len(order)
    assert 0 < order[-1] < kin.LEAST < order[-2]
    mac = changed("cpu.model", "Apple M3", arm)
    mac["cpu"]["numbers"] = ""
    assert likeness(mac, arm) > likeness(mac, FIELDS)


def test_recorded_hosts():
    one, other = (profile.host for profile in RECORDED)
    assert [fingerprint_of(profile.host) for profile in RECORDED] == [profile.fingerprint for profile in RECORDED]
    assert likeness(one, one) == likeness(other, other) == 1
    assert likeness(one, other) == likeness(other, one) == pytest.approx(0.6 * (0.75 + 0.25 * 17 / 22))
    assert likeness(one, other, "cuda") == 0


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "name", "x"]), inner),
    max_leaves=5,
)
leaves = [f"{section}.{name}" for section in ("system", "versions", "cpu") for name in FIELDS[section]]
places = st.sampled_from([*leaves, *FIELDS])


@given(st.lists(st.tuples(places, junk | st.just(GONE)), max_size=4), st.sampled_from(["cpu", "cuda"]))
def test_anything_in_a_file_gives_a_number(changes, device):
    other = copy.deepcopy(FIELDS)
    for path, value in changes:
        section = other.get(path.partition(".")[0]) if "." in path else other
        if isinstance(section, dict):
            section.pop(path.rpartition(".")[2], None)
            if value is not GONE:
                section[path.rpartition(".")[2]] = value
    found = likeness(FIELDS, other, device)
    assert 0 <= found <= 1
    assert found == likeness(other, FIELDS, device)


def test_the_rules_are_those_of_the_docs():
    assert kin.table() in (ROOT / "docs" / "how-it-decides.md").read_text(encoding="utf-8")
