"""kin.py: likeness of hosts by stated rules, and the profiles that may serve as priors, whatever lies beside them."""

from __future__ import annotations

import copy
import itertools
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.system.host import fingerprint_of
from autokern.tuning import kin, layers, store
from autokern.tuning.checksum import sealed
from autokern.tuning.kin import likeness, priors
from autokern.tuning.profile import Profile, Timing, Trial

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


# --- priors ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path):
    return Settings(home=tmp_path / "home")


HERE = fingerprint_of(FIELDS)


def profile(fields: dict, *sizes: int) -> Profile:
    trials = [Trial(Problem(op="qr", m=n, n=n), {"stock": Timing(1e-3)}) for n in sizes or (8,)]
    return Profile(host=fields, fingerprint=fingerprint_of(fields), trials=trials)


def keep(settings: Settings, fields: dict, *sizes: int) -> Path:
    path = store.save(settings, profile(fields, *sizes))
    assert path is not None
    return path


def found(settings: Settings, device: str = "cpu") -> list[tuple[str, float]]:
    return [(prior.fingerprint, alike) for prior, alike in priors(settings, FIELDS, HERE, device)]


THREADS = [changed("cpu.threads", number) for number in (4, 2, 1, 16, 32, 6)]


@pytest.fixture
def read(monkeypatch):
    """Files that are read whole, in order."""
    seen = []
    examined, read_file = store.examined, store.read_file
    monkeypatch.setattr(store, "examined", lambda folder, name: seen.append(name) or examined(folder, name))
    monkeypatch.setattr(store, "read_file", lambda path: seen.append(path.name) or read_file(path))
    return seen


def test_the_most_alike_come_first_and_the_fifth_is_never_read(settings, read):
    keep(settings, FIELDS)
    for fields in THREADS:
        keep(settings, fields)
    read.clear()
    names = [fingerprint_of(THREADS[i]) for i in (5, 0, 3, 1, 4)]  # 6, then 4 and 16, then 2 and 32 threads
    answer = found(settings)
    assert [alike for _, alike in answer] == pytest.approx([0.7**0.41503749927, 0.7, 0.7, 0.7**2])
    assert {name for name, _ in answer[:3]} == set(names[:3])
    assert HERE not in {name for name, _ in answer}
    assert read == [name for name, _ in answer]
    assert found(settings) == answer
    assert len(read) == 4  # each file once
    keep(settings, THREADS[5], 16)
    read.clear()
    assert len(priors(settings, FIELDS, HERE)[0][0].trials) == 2  # a file that changed is read again
    assert read == [names[0]]


def test_what_is_too_unlike_or_has_no_measurements_does_not_serve(settings):
    keep(settings, changed("cpu.threads", 4096))
    store.save(settings, msgspec.structs.replace(profile(THREADS[0]), trials=[]))
    store.save(settings, msgspec.structs.replace(profile(THREADS[1]), host={}))
    assert found(settings) == []


def test_a_gpu_is_matched_by_profiles_of_such_a_gpu(settings):
    keep(settings, changed("accelerators", []))
    keep(settings, changed("accelerators", [A100]))
    assert len(found(settings)) == 2
    assert [name for name, _ in found(settings, "cuda")] == [fingerprint_of(changed("accelerators", [A100]))]


def _newer(data: bytes) -> bytes:
    return sealed(2, data.partition(b"\n")[2])


FAULTS = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "cut in the host": lambda data: data[:300],
    "flipped": lambda data: data[:-20] + bytes([data[-20] ^ 1]) + data[-19:],
    "flipped in the host": lambda data: data.replace(b"AVX2", b"AVX3"),
    "newer": _newer,
    "of another host": lambda data: sealed(1, msgspec.json.encode(profile(THREADS[4]))),
    "no JSON": lambda data: b"\x80\x04pickle",
    "deep": lambda data: data.partition(b"\n")[0] + b'\n{"host":' + b"[" * 100_000,
    "plain": lambda data: data.partition(b"\n")[2],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_files_are_skipped_and_left_alone(settings, fault):
    bad = keep(settings, THREADS[5])
    keep(settings, THREADS[1])
    data = FAULTS[fault](bad.read_bytes())
    bad.write_bytes(data)
    assert [name for name, _ in found(settings)] == [fingerprint_of(THREADS[1])]
    assert bad.read_bytes() == data
    assert sorted(path.suffix for path in settings.home.iterdir()) == [".json", ".json", ".lock", ".lock"]


def test_what_is_no_file_of_ours_is_skipped(settings, tmp_path):
    good = keep(settings, THREADS[0])
    os.mkfifo(settings.home / ("1" * 32 + ".json"))
    (settings.home / ("2" * 32 + ".json")).mkdir()
    (settings.home / ("3" * 32 + ".json")).symlink_to(good)
    (settings.home / "notes.json").write_bytes(good.read_bytes())
    shared = keep(settings, THREADS[1])
    shared.chmod(0o666)
    large = keep(settings, THREADS[2])
    os.truncate(large, kin._LARGEST + 1)
    assert [name for name, _ in found(settings)] == [good.stem]
    settings.home.chmod(0o777)
    assert found(Settings(home=settings.home)) == []
    assert found(Settings(home=tmp_path / "none")) == []
    assert found(Settings(home=Path("/dev/null/autokern"))) == []


def test_only_the_newest_files_are_looked_at(settings, monkeypatch):
    monkeypatch.setattr(kin, "_MOST_FILES", 2)
    for age, fields in enumerate(THREADS):
        path = keep(settings, fields)
        os.utime(path, (1e9 - age, 1e9 - age))
    assert {name for name, _ in found(settings)} == {fingerprint_of(fields) for fields in THREADS[:2]}


def test_layers_serve_in_place_of_the_home_folder(settings, tmp_path, read):
    keep(settings, THREADS[0])
    site = tmp_path / "site"
    site.mkdir()
    for name, fields in (("own", FIELDS), ("b", THREADS[1]), ("c", THREADS[2])):
        store.write_file(site / f"{name}.json", profile(fields))
    one = tmp_path / "one.json"
    store.write_file(one, profile(THREADS[1], 32))
    read.clear()

    def of(*paths: Path) -> list[tuple[str, list[int]]]:
        there = priors(Settings(home=settings.home, profile=paths), FIELDS, HERE)
        return [(prior.fingerprint, sorted(t.problem.n for t in prior.trials)) for prior, _ in there]

    two, three = fingerprint_of(THREADS[1]), fingerprint_of(THREADS[2])
    assert of(site) == [(two, [8]), (three, [8])]
    assert read == ["b.json", "c.json"]
    assert of(one, site) == [(two, [8, 32]), (three, [8])]  # of one host in two layers
    assert of(one) == of(site / "own.json") == []  # used as it is
    assert of(site / "own.json", one) == [(two, [32])]
    assert of(one, tmp_path / "gone.json") == []


def test_hosts_of_a_cluster_serve_each_other(tmp_path):
    for recorded in RECORDED:
        store.write_file(tmp_path / f"{recorded.fingerprint[:4]}.json", recorded)
    for own, other in itertools.permutations(RECORDED):
        settings = Settings(profile=(tmp_path,))
        assert len(layers.in_force(settings, own.fingerprint).trials) == len(own.trials)
        ((prior, alike),) = priors(settings, own.host, own.fingerprint)
        assert (prior.fingerprint, alike) == (other.fingerprint, likeness(own.host, other.host))
