"""store.py, files.py: whatever lies on disk, whoever writes it, a profile is whole and ours or none."""

import contextlib
import errno
import json
import logging
import os
import secrets
import stat
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import msgspec
import platformdirs
import pytest
from support.fakes import as_if_of_autokern
from support.programs import BARE
from support.synthetic import HOST, kept, profile

from autokern.core.errors import AutokernWarning, ProfileError
from autokern.core.settings import Settings
from autokern.system import files
from autokern.tuning import store
from autokern.tuning.profile import Profile

ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
as_root = pytest.mark.skipif(not ROOT, reason="needs root, to give files to another user")
no_root = pytest.mark.skipif(ROOT, reason="needs a user other than root, whom file modes bind")


@pytest.fixture(autouse=True)
def _fresh():
    store._reported.clear()
    yield
    store._reported.clear()


@pytest.fixture
def settings(tmp_path):
    return Settings(home=tmp_path / "home")


def names(settings: Settings, *suffixes: str) -> list[str]:
    return sorted(p.name for p in settings.home.iterdir() if p.name.endswith(suffixes))


def place(settings: Settings) -> Path:
    path = store.save(settings, profile(8))
    assert path is not None
    return path


def is_not_kept(settings: Settings, told: str = "", found: Profile | None = None) -> None:
    """Saving warns once, and writes nothing."""
    with pytest.warns(AutokernWarning, match=told):
        assert store.save(settings, found or profile(16)) is None
    assert store.save(settings, found or profile(16)) is None  # warnings are errors here: there is no second one


def test_what_is_written_is_private_and_what_is_read(settings):
    assert kept(settings) is None
    assert not settings.home.exists()  # looking makes nothing
    path = store.save(settings, profile(8, 16))
    assert path == settings.home / f"{HOST}.json"
    assert store.load(settings, HOST) == store.in_force(settings, HOST) == profile(8, 16)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(settings.home.stat().st_mode) == 0o700
    assert names(settings, ".tmp") == []
    assert store.origin(settings, HOST) == f"kept in\n{path}"


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "x" * 32, "0123", "0" * 32 + "/x", "0" * 31 + "\n"])
def test_a_fingerprint_that_is_none_names_no_file(settings, name):
    assert kept(settings, name) is None
    is_not_kept(settings, "no name of a file", profile(8, fingerprint=name))
    assert names(settings, ".json") == []


def test_a_profile_that_could_not_be_read_back_is_not_written(settings):
    place(settings)
    is_not_kept(settings, "", profile(16, error=float("nan")))
    assert kept(settings) == {8}


FINGERPRINT = b'{"fingerprint":"' + HOST.encode() + b'"'
NO_PROFILES = [
    b"",
    b"\0" * 4096,
    b"[" * 10**6,
    b'{"host":' * 10**5,
    b"\xff\xfe",
    b'{"schema":1}',
    b'{"schema":1,"trials":[]}',
    b'{"schema": 1, "sha256": "00"}\n{}',
    b'{"trials":[{"problem":{"op":"qr"},"timings":{"stock":{"seconds":NaN}}}]}',
    FINGERPRINT + b',"setup":{"qr.cpu":-1}}',
    FINGERPRINT + b',"trials":[{"problem":{"op":"qr","m":-1},"timings":{}}]}',
    FINGERPRINT + b"} {}",
]


def _filled(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


def _elsewhere(path: Path) -> None:
    (path.parent / "moved").write_bytes(store.encode(profile(8)))
    path.symlink_to(path.parent / "moved")


INSTEAD = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a folder with a file in it": _filled,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a good profile": _elsewhere,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "another host's": lambda path: path.write_bytes(store.encode(profile(8, fingerprint="f" * 32))),
    **{f"data {k}": lambda path, data=data: path.write_bytes(data) for k, data in enumerate(NO_PROFILES)},
}
SPOILT = [
    *(pytest.param(lambda path, make=make: path.unlink() or make(path), id=name) for name, make in INSTEAD.items()),
    pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-1]), id="all but the last byte"),
    pytest.param(lambda path: os.truncate(path, 2**30), id="a huge sparse file"),
    pytest.param(lambda path: os.chown(path, 12345, -1), id="another user's", marks=as_root),
    pytest.param(lambda path: path.chmod(0o620), id="the group may write it"),
    pytest.param(lambda path: path.chmod(0o602), id="others may write it"),
    pytest.param(lambda path: path.chmod(0), id="nobody may read it", marks=no_root),
]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("spoil", SPOILT)
def test_what_is_no_private_profile_of_this_host_is_neither_waited_for_nor_read_and_one_save_repairs_it(
    settings, spoil
):
    spoil(place(settings))
    tracemalloc.start()
    try:
        assert kept(settings) is None
        assert tracemalloc.get_traced_memory()[1] < 2**27  # 64 MiB and a byte are read of a file of any size
    finally:
        tracemalloc.stop()
    assert store.save(settings, profile(16)) is not None
    assert kept(settings) == {16}
    assert not (settings.home / "moved").exists() or store.read_file(settings.home / "moved") == profile(8)


def test_damage_is_logged_once_and_set_aside_by_the_next_save(settings, monkeypatch):
    records = []
    monkeypatch.setattr(logging.getLogger("autokern"), "handle", records.append)
    for _ in range(12):
        place(settings).write_bytes(b"damage")
        assert kept(settings) is None
        assert names(settings, ".json") == [f"{HOST}.json"]  # looking changes nothing
    assert [record.levelname for record in records] == ["WARNING"]
    assert names(settings, ".bad") == [f"{HOST}.bad"]
    assert (settings.home / f"{HOST}.bad").read_bytes() == b"damage"


def exhausted(settings: Settings, patch: pytest.MonkeyPatch) -> None:
    def fail(*_args, **_kwargs):
        raise OSError(errno.EMFILE, "too many open files")

    patch.setattr(store, "contents", fail)


NEWER = [b'{"schema":17,"anything":"else"}\nbinary\xff', b'{\n  "schema": 4,\n  "trials": []\n}\n']
IN_THE_WAY = [
    *((lambda settings, _, data=data: place(settings).write_bytes(data), "newer autokern", None) for data in NEWER),
    (exhausted, "too many open files", None),
    (lambda settings, _: settings.home.chmod(0o720), "chmod", None),
    (lambda settings, _: settings.home.chmod(0o702), "chmod", None),
    pytest.param(lambda settings, _: os.chown(settings.home, 12345, -1), "another user", None, marks=as_root),
    pytest.param(lambda settings, _: settings.home.chmod(0o500), "", {8}, marks=no_root),
]


@pytest.mark.parametrize(("spoil", "told", "meanwhile"), IN_THE_WAY)
def test_what_keeps_from_writing_costs_one_warning_and_no_profile(settings, monkeypatch, spoil, told, meanwhile):
    path = place(settings)
    spoil(settings, monkeypatch)
    before = path.read_bytes()
    assert kept(settings) == meanwhile
    is_not_kept(settings, told)
    with store.calibrating(settings, HOST, "exotic") as granted:
        assert granted
    monkeypatch.undo()
    settings.home.chmod(0o700)
    assert path.read_bytes() == before
    assert names(settings, ".tmp", ".bad") == []


def test_home_is_where_the_user_says_or_the_cache_folder(monkeypatch, tmp_path):
    assert store.home(Settings(home=tmp_path)) == tmp_path
    assert store.home(Settings(home=Path("here"))) == Path.cwd() / "here"
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / name)
    assert store.home(Settings()) == tmp_path / "autokern"


def test_no_home_means_memory_only_and_no_stray_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: Path("~/.cache") / name)
    assert store.home(Settings()) is kept(Settings()) is None
    is_not_kept(Settings(), "no cache folder")
    assert store.clear(Settings()) == []
    with store.calibrating(Settings(), HOST, "qr") as granted:
        assert granted
    assert list(tmp_path.iterdir()) == []

    def nobody(_name):
        raise RuntimeError("Could not determine home directory")

    monkeypatch.setattr(platformdirs, "user_cache_path", as_if_of_autokern(nobody))
    assert store.home(Settings()) is None


@as_root
@pytest.mark.parametrize(
    ("to", "below"), [("home", ""), ("", "home"), ("gone", "")], ids=["home", "on the way", "gone"]
)
def test_home_behind_another_users_link_is_not_used(settings, tmp_path, to, below):
    place(settings)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / to)
    there = Settings(home=link / below)
    if to != "gone":
        assert kept(there) == {8}  # one's own link is fine
    os.chown(link, 12345, -1, follow_symlinks=False)
    assert kept(there) is None
    is_not_kept(there, "another user")
    assert kept(settings) == {8}
    assert not (tmp_path / "gone").exists()


def test_a_folder_that_cannot_be_synced_is_no_trouble(settings, monkeypatch):
    sync = os.fsync

    def files_only(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(fd)

    monkeypatch.setattr(os, "fsync", files_only)
    assert store.save(settings, profile(8)) is not None
    assert kept(settings) == {8}


def test_stale_temporaries_are_swept(settings):
    place(settings)
    old, young, alien = (settings.home / f"{name}.tmp" for name in (f"{HOST}.{'0' * 16}", f"{HOST}.{'1' * 16}", "my"))
    for path in (old, young, alien):
        path.touch()
    for path in (old, alien):
        os.utime(path, (0, time.time() - 7200))
    store.save(settings, profile(16))
    assert [path.exists() for path in (old, young, alien)] == [False, True, True]


def test_what_stands_in_the_place_of_a_temporary_file_is_not_written(settings, monkeypatch):
    place(settings)
    monkeypatch.setattr(secrets, "token_hex", lambda count: "00" * count)
    theirs = settings.home / f"{HOST}.{'00' * 8}.tmp"
    theirs.write_text("theirs")
    is_not_kept(settings, "File exists")
    assert theirs.read_text() == "theirs"


def test_strict_raises(settings):
    strict = Settings(home=settings.home, strict=True)
    assert kept(strict) is None  # nothing there is no trouble
    place(settings).write_bytes(b"damage")
    with pytest.raises(ProfileError, match=r"asked for .*found: .*damaged"):
        store.load(strict, HOST)
    nowhere = Settings(home=Path("/dev/null/autokern"), strict=True)
    with pytest.raises(ProfileError, match=r"asked to .*found: "):
        store.save(nowhere, profile(8))


PROGRAM = f"""{BARE}
import os, time
from pathlib import Path
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.tuning import store
from autokern.tuning.profile import Profile, Timing, Trial

home, host, who = sys.argv[1:]
settings = Settings(home=Path(home), strict=True)
"""


@contextlib.contextmanager
def program(settings: Settings, code: str, who: int = 0):
    """A process of its own that runs code with the same home."""
    words = [sys.executable, "-S", "-c", PROGRAM + code, settings.home, HOST, f"{who}"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as found:
        yield found


def test_concurrent_writers_lose_no_key(settings):
    code = """
sys.stdin.readline()
for n in range(1, 6):
    trial = Trial(Problem(op="qr", m=int(who), n=n), {"stock": Timing(1.0)})
    store.save(settings, Profile(fingerprint=host, trials=[trial]))
"""
    writers = range(1, 17)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(program(settings, code, who)) for who in writers]
        for writer in crowd:  # all are past their imports before the first one writes
            writer.stdin.write("go\n")
            writer.stdin.close()
        assert [writer.wait(timeout=60) for writer in crowd] == [0] * len(writers)
    found = {(trial.problem.m, trial.problem.n) for trial in store.load(settings, HOST).trials}
    assert found == {(who, n) for who in writers for n in range(1, 6)}
    assert names(settings, ".tmp", ".bad") == []


def test_save_does_not_wait_for_a_stuck_lock(settings, monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE", 0.1)
    place(settings)
    with files.Folder(settings.home, private=True).locked(f"{HOST}.lock") as held:
        assert held
        before = time.monotonic()
        assert store.save(settings, profile(16)) is not None
        assert time.monotonic() - before < 5
    assert kept(settings) == {8, 16}


def test_the_right_to_calibrate_is_exclusive_between_processes_and_ends_with_a_crash(settings):
    code = (
        "with store.calibrating(settings, host, 'qr') as granted:\n    print(granted, flush=True); sys.stdin.read()\n"
    )
    with program(settings, code) as other:
        assert other.stdout.readline() == "True\n"
        with store.calibrating(settings, HOST, "qr") as granted:
            assert not granted
        other.kill()
    with store.calibrating(settings, HOST, "qr") as granted:
        assert granted


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_without_locks_everybody_may_calibrate(settings, monkeypatch, number):
    import fcntl

    def unsupported(_fd, _operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with store.calibrating(settings, HOST, "qr") as one, store.calibrating(settings, HOST, "qr") as two:
        assert one
        assert two
    assert store.save(settings, profile(8)) is not None
    monkeypatch.setitem(sys.modules, "fcntl", None)  # Windows
    with store.calibrating(settings, HOST, "qr") as granted:
        assert granted


def test_written_and_kept_files_are_read(settings, tmp_path):
    plain = tmp_path / "host.json"
    store.write_file(plain, profile(8))
    assert json.loads(plain.read_text())["fingerprint"] == HOST
    assert plain.read_text().startswith('{"schema":2,')  # an older autokern knows what is newer
    indented = tmp_path / "indented.json"
    indented.write_text(json.dumps(json.loads(plain.read_text()), indent=2))
    assert store.read_file(indented) == profile(8)
    store.write_file(indented, Profile())
    assert store.read_file(indented) == Profile()
    (tmp_path / "link.json").symlink_to(plain)
    for path in (plain, tmp_path / "link.json", place(settings)):
        assert store.read_file(path) == profile(8)


def test_a_copy_that_is_pinned_is_in_force_on_any_host_and_nothing_is_written(settings, monkeypatch, tmp_path):
    copy = tmp_path / "copy.json"
    copy.write_bytes(place(settings).read_bytes())
    pinned = Settings(home=tmp_path / "none", profile=copy)
    monkeypatch.setattr(files.Folder, "open", None)
    assert store.in_force(pinned, "0" * 32) == profile(8)
    assert not pinned.home.exists()
    assert store.origin(pinned, HOST) == f"pinned by AUTOKERN_PROFILE:\n{copy}"
    frozen = msgspec.structs.replace(pinned, deterministic=True)
    alone = msgspec.structs.replace(frozen, profile=None)
    assert [store.leaves_aside(each) for each in (settings, frozen, alone)] == [False, False, True]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        *((data, r"asked for .*found: .*calibrate --output") for data in (b"", b"{", b"[]", b'{"schema":3}')),
        *((data, r"a newer autokern wrote it .*upgrade") for data in (b'{"schema":3,"sums":[1]}', *NEWER)),
        *((data, r"an earlier autokern wrote it .*measure again") for data in NO_PROFILES[6:8]),
    ],
)
def test_a_named_file_that_is_no_profile_raises(tmp_path, data, told):
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(ProfileError, match=told):
        store.read_file(path)
    assert path.read_bytes() == data


def full(_fd):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_write_file_replaces_nothing_but_files(tmp_path, monkeypatch):
    for path in (Path("/dev/null"), tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(ProfileError, match="asked to write"):
            store.write_file(path, profile(8))
        with pytest.raises(ProfileError):
            store.read_file(path)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    store.write_file(link, profile(8))
    assert link.is_symlink()
    assert store.read_file(real) == profile(8)
    before = real.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ProfileError):
        store.write_file(link, profile(16))
    assert real.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_clear_removes_what_is_ours_and_nothing_else(settings):
    assert store.clear(settings) == []
    place(settings).write_bytes(b"damage")
    place(settings)
    with store.calibrating(settings, HOST, "qr"):
        pass
    (settings.home / f"{HOST}.{'0' * 16}.tmp").touch()
    alien = [settings.home / name for name in ("notes.json", "x.lock", "a.tmp", f"{HOST}.json.orig", f"{HOST}.txt")]
    for path in alien:
        path.touch()
    settings.home.chmod(0o702)
    with pytest.raises(ProfileError, match="asked to clear"):
        store.clear(settings)
    settings.home.chmod(0o700)
    assert len(store.clear(settings)) == 5
    assert sorted(settings.home.iterdir()) == sorted(alien)
