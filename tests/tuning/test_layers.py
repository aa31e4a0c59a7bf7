"""layers.py: which files are in force, by their content and order; nothing that was named is written or guessed."""

from __future__ import annotations

import json
import os

import msgspec
import pytest

from autokern.core.errors import ProfileError
from autokern.core.problem import Problem
from autokern.core.settings import Settings, from_environment
from autokern.system import files
from autokern.tuning import layers, store
from autokern.tuning.checksum import sealed
from autokern.tuning.profile import Ban, Profile, Timing, Trial

HERE, ELSEWHERE = "0123456789abcdef" * 2, "fedcba9876543210" * 2
no_root = pytest.mark.skipif(
    hasattr(os, "geteuid") and os.geteuid() == 0, reason="needs a user other than root, whom file modes bind"
)


def profile(seconds: dict[int, float], fingerprint: str = HERE, candidate: str = "cpu", **more: object) -> Profile:
    trials = [
        Trial(Problem(op="qr", m=n, n=n), {"stock": Timing(1.0), candidate: Timing(s)}) for n, s in seconds.items()
    ]
    return Profile(host={"cpu": {"model": fingerprint[:4]}}, fingerprint=fingerprint, trials=trials, **more)


@pytest.fixture
def write(tmp_path):
    def written(name: str, what: Profile):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        store.write_file(path, what)
        return path

    return written


def in_force(*paths) -> Profile | None:
    return layers.in_force(Settings(profile=paths), HERE)


def times(found: Profile | None, candidate: str = "cpu") -> dict[int, float]:
    assert found is not None
    return {t.problem.n: t.timings[candidate].seconds for t in found.trials if candidate in t.timings}


def test_the_first_layer_wins_by_problem_and_candidate(write):
    ban = Ban("qr", "looped", "float64", "cpu", "wrong")
    first = write("a.json", profile({8: 1.0, 16: 1.0}, created="2026-01-01T00:00:00Z"))
    second = write("b.json", profile({16: 2.0, 32: 2.0}, banned=[ban], setup={"qr.cpu": 3.0}))
    third = write("c.json", profile({8: 4.0, 64: 4.0}, candidate="tiled"))
    found = in_force(first, second, third)
    assert times(found) == {8: 1.0, 16: 1.0, 32: 2.0}
    assert times(found, "tiled") == {8: 4.0, 64: 4.0}
    assert (found.banned, found.setup, found.fingerprint) == ([ban], {"qr.cpu": 3.0}, HERE)
    assert times(in_force(second, first)) == {8: 1.0, 16: 2.0, 32: 2.0}


def test_a_layer_of_another_machine_is_not_in_force_unless_it_is_alone(write):
    own, other = write("own.json", profile({8: 1.0})), write("other.json", profile({8: 9.0, 16: 9.0}, ELSEWHERE))
    assert times(in_force(other, own)) == times(in_force(own, other)) == {8: 1.0}
    assert in_force(other, write("third.json", profile({8: 1.0}, "0" * 32))) is None
    assert times(in_force(other)) == {8: 9.0, 16: 9.0}
    for text in (
        f"{other}",
        f"{other}{os.pathsep}{other}",
        f"{os.pathsep}{other}{os.pathsep}",
    ):  # one file all the same
        assert times(layers.in_force(from_environment({"AUTOKERN_PROFILE": text}), HERE)) == {8: 9.0, 16: 9.0}
    nameless = write("nameless.json", msgspec.structs.replace(profile({8: 1.0}), fingerprint=""))
    assert in_force(nameless).fingerprint == ""
    assert times(in_force(nameless, own)) == {8: 1.0}
    assert in_force(nameless, other) is None


def test_a_folder_holds_one_file_for_each_kind_of_node(write, tmp_path):
    write("site/epyc.json", profile({8: 1.0}))
    write("site/xeon.json", profile({8: 9.0}, ELSEWHERE))
    (tmp_path / "site" / "other.json").write_text('{"nodes": 3}')
    (tmp_path / "site" / "broken.json").write_text("{")
    (tmp_path / "site" / "readme.txt").write_text("profiles")
    (tmp_path / "site" / "folder.json").mkdir()
    (tmp_path / "site" / "gone.json").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "site" / "fifo.json")
    site = tmp_path / "site"
    assert times(in_force(site)) == {8: 1.0}
    own = write("own.json", profile({8: 2.0, 16: 2.0}))
    assert times(in_force(site, own)) == {8: 1.0, 16: 2.0}
    assert times(in_force(own, site)) == {8: 2.0, 16: 2.0}
    assert layers.in_force(Settings(profile=(site,)), "0" * 32) is None  # no error: such a node has no file yet
    (tmp_path / "empty").mkdir()
    assert in_force(tmp_path / "empty") is None


def test_a_home_folder_may_be_a_layer(tmp_path):
    home = Settings(home=tmp_path / "home")
    store.save(home, profile({8: 1.0}))
    store.save(home, profile({8: 9.0}, ELSEWHERE))
    assert times(in_force(home.home)) == {8: 1.0}


def test_a_file_of_this_host_that_is_broken_is_an_error_that_names_it(write, tmp_path):
    own = write(f"site/{HERE}.json", profile({8: 1.0}))
    for data in (
        b"",
        b"{",
        own.read_bytes()[:-30],
        own.read_bytes().replace(b"qr", b"\xff\xff"),
        sealed(1, b"{}")[:-1],
    ):
        own.write_bytes(data)
        with pytest.raises(ProfileError, match=rf"asked for .*{HERE}\.json; found: .*export"):
            in_force(tmp_path / "site")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"schema": 99}', b'{"nodes": 3}', sealed(1, b"{}")[:-1]])
def test_a_named_file_that_is_no_profile_is_an_error_that_names_it(write, tmp_path, data):
    own, bad = write("own.json", profile({8: 1.0})), tmp_path / "bad.json"
    bad.write_bytes(data)
    for _ in range(2):
        with pytest.raises(ProfileError, match=r"asked for .*bad\.json; found: "):
            in_force(own, bad)
    assert bad.read_bytes() == data
    store.write_file(bad, profile({8: 9.0, 16: 9.0}))  # mended
    assert times(in_force(own, bad)) == {8: 1.0, 16: 9.0}


def test_a_missing_layer_is_an_error_that_names_it(write, tmp_path):
    own = write("own.json", profile({8: 1.0}))
    for path in (tmp_path / "gone.json", own / "below.json"):
        with pytest.raises(ProfileError, match=rf"asked for the profile in {path}; found: "):
            in_force(own, path)


@no_root
def test_a_folder_that_cannot_be_listed_is_an_error_that_names_it(write, tmp_path):
    own, closed = write("own.json", profile({8: 1.0})), tmp_path / "closed"
    closed.mkdir(mode=0)
    with pytest.raises(ProfileError, match=r"asked for the profiles in .*closed; found: "):
        in_force(own, closed)


def _sorted(what: Profile) -> bytes:
    return json.dumps(json.loads(store.plain(what)), sort_keys=True, indent=4).encode()


@pytest.mark.parametrize(
    "form", [store.plain, lambda p: sealed(1, msgspec.json.encode(p)), msgspec.json.encode, _sorted]
)
def test_a_file_is_known_in_every_form(tmp_path, form):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "x.json").write_bytes(form(profile({8: 1.0})))
    assert times(in_force(tmp_path / "site")) == {8: 1.0}
    (file,) = layers.files(Settings(profile=(tmp_path / "site",)))
    assert (file.fingerprint, file.host) == (HERE, {"cpu": {"model": HERE[:4]}})


def test_whose_profile_it_is_is_read_from_the_beginning_alone(monkeypatch, write, tmp_path):
    write("site/own.json", profile({8: 1.0}))
    write("site/other.json", profile(dict.fromkeys(range(1, 2000), 9.0), ELSEWHERE))
    read = []
    monkeypatch.setattr(store, "read_file", lambda path, real=store.read_file: read.append(path.name) or real(path))
    assert times(in_force(tmp_path / "site")) == {8: 1.0}
    assert read == ["own.json"]
    in_force(tmp_path / "site")
    assert read == ["own.json"]  # while the file is the same
    write("site/own.json", profile({8: 2.0}))
    assert times(in_force(tmp_path / "site")) == {8: 2.0}
    assert read == ["own.json", "own.json"]


def test_a_passing_fault_is_not_remembered(monkeypatch, write):
    own, other = write("own.json", profile({8: 1.0})), write("other.json", profile({8: 1.0}, ELSEWHERE))
    with monkeypatch.context() as patch:
        patch.setattr(store, "contents", lambda *_, **__: (_ for _ in ()).throw(OSError(24, "too many open files")))
        with pytest.raises(ProfileError, match="too many open files"):
            in_force(own, other)
    assert times(in_force(own, other)) == {8: 1.0}


def test_nothing_is_written_where_layers_are(monkeypatch, write, tmp_path):
    write("site/own.json", profile({8: 1.0}))
    (tmp_path / "site" / "broken.json").write_text("{")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.rglob("*"))}
    monkeypatch.setattr(files.Folder, "open", None)
    settings = Settings(home=tmp_path / "home", profile=(tmp_path / "site", tmp_path / "site" / "own.json"))
    assert layers.in_force(settings, HERE) is not None
    assert "own.json" in layers.origin(settings, HERE)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.rglob("*"))} == before


def test_origin_tells_layers_in_force_from_priors(write, tmp_path):
    own, other = write("own.json", profile({8: 1.0})), write("other.json", profile({8: 1.0}, ELSEWHERE))
    assert layers.origin(Settings(profile=(own,)), HERE) == f"pinned by AUTOKERN_PROFILE:\n{own}"
    told = layers.origin(Settings(profile=(other, own)), HERE).splitlines()
    assert told == ["in force by AUTOKERN_PROFILE:", str(own), "of other machines, priors only:", str(other)]
    home = layers.origin(Settings(home=tmp_path / "home"), HERE)
    assert home == f"kept in\n{tmp_path / 'home' / HERE}.json"
