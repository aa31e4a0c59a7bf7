"""store.py, files.py: whatever lies on disk, whoever writes it, a profile is whole and ours or none."""

from __future__ import annotations

import errno
import json
import logging
import os
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
from support.programs import BARE, python

from autokern.core.errors import AutokernWarning, ProfileError
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.system import files
from autokern.tuning import store
from autokern.tuning.profile import Profile, Timing, Trial

HOST = "0123456789abcdef" * 2
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


def profile(*sizes: int, fingerprint: str = HOST, seconds: float = 1e-3) -> Profile:
    trials = [Trial(Problem(op="qr", m=n, n=n), {"stock": Timing(seconds), "cpu": Timing(seconds / 2)}) for n in sizes]
    return Profile(host={"cpu": "test"}, fingerprint=fingerprint, trials=trials, levels={"qr@cpu": "quick"})


def sizes(found: Profile | None) -> set[int]:
    assert found is not None
    return {trial.problem.n for trial in found.trials}


def names(settings: Settings, suffix: str) -> list[str]:
    return sorted(p.name for p in settings.home.iterdir() if p.name.endswith(suffix))


def place(settings: Settings) -> Path:
    path = store.save(settings, profile(8))
    assert path is not None
    return path


def refused(settings: Settings) -> None:
    """Nothing is loaded, nothing raised, and one save repairs it."""
    assert store.load(settings, HOST) is None
    assert store.save(settings, profile(16)) is not None
    assert sizes(store.load(settings, HOST)) == {16}


# --- what is written is what is read -------------------------------------------------------------------------------


def test_round_trip(settings):
    assert store.load(settings, HOST) is None
    assert not settings.home.exists()  # looking makes nothing
    path = store.save(settings, profile(8, 16))
    assert path == settings.home / f"{HOST}.json"
    assert store.load(settings, HOST) == profile(8, 16)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(settings.home.stat().st_mode) == 0o700
    assert names(settings, ".tmp") == []


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "x" * 32, "0123", "0" * 32 + "/x", "0" * 31 + "\n"])
def test_a_fingerprint_that_is_none_names_no_file(settings, name):
    assert store.load(settings, name) is None
    with pytest.warns(AutokernWarning, match="no name of a file"):
        assert store.save(settings, profile(8, fingerprint=name)) is None
    assert names(settings, ".json") == []


def test_a_profile_that_could_not_be_read_back_is_not_written(settings):
    place(settings)
    bad = Profile(fingerprint=HOST, trials=[Trial(Problem(op="qr"), {"stock": Timing(1.0, error=float("nan"))})])
    with pytest.warns(AutokernWarning):
        assert store.save(settings, bad) is None
    assert sizes(store.load(settings, HOST)) == {8}


# --- what lies on disk ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        None,  # all but the last byte
        b"",
        b"\0" * 4096,
        b"[" * 10**6,
        b'{"host":' * 10**5,
        b"\xff\xfe",
        b'{"schema":1}',
        b'{"trials":[{"problem":{"op":"qr"},"timings":{"stock":{"seconds":NaN}}}]}',
        b'{"fingerprint":"' + HOST.encode() + b'","setup":{"qr.cpu":-1}}',
        b'{"fingerprint":"' + HOST.encode() + b'","trials":[{"problem":{"op":"qr","m":-1},"timings":{}}]}',
        b'{"fingerprint":"' + HOST.encode() + b'"} {}',
    ],
)
def test_any_bytes_are_a_profile_or_none(settings, data):
    path = place(settings)
    path.write_bytes(path.read_bytes()[:-1] if data is None else data)
    found = store.load(settings, HOST)
    assert found is None or found.trials == []
    assert store.save(settings, profile(16)) is not None
    assert sizes(store.load(settings, HOST)) == {16}


def test_a_huge_sparse_file_is_not_read(settings):
    path = place(settings)
    with open(path, "wb") as file:
        file.truncate(2**30)
    tracemalloc.start()
    try:
        refused(settings)
        assert tracemalloc.get_traced_memory()[1] < 2**27  # 64 MiB and a byte are read
    finally:
        tracemalloc.stop()


def _filled(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


INSTEAD = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a folder with a file in it": _filled,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
}


def _elsewhere(path: Path) -> None:
    path.symlink_to(path.replace(path.with_name("elsewhere")))


SPOILT = [
    *(pytest.param(lambda path, make=make: path.unlink() or make(path), id=name) for name, make in INSTEAD.items()),
    pytest.param(_elsewhere, id="a link to a good profile"),
    pytest.param(lambda path: path.write_bytes(store.encode(profile(8, fingerprint="f" * 32))), id="another host's"),
    pytest.param(lambda path: os.chown(path, 12345, -1), id="another user's", marks=as_root),
    pytest.param(lambda path: path.chmod(0o620), id="the group may write it"),
    pytest.param(lambda path: path.chmod(0o602), id="others may write it"),
    pytest.param(lambda path: path.chmod(0), id="nobody may read it", marks=no_root),
]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("spoil", SPOILT)
def test_what_is_no_private_file_of_this_host_is_neither_waited_for_nor_read(settings, spoil):
    spoil(place(settings))
    refused(settings)
    if (moved := settings.home / "elsewhere").exists():
        assert sizes(store.read_file(moved)) == {8}


def test_a_passing_fault_costs_no_profile(settings, monkeypatch):
    path = place(settings)
    real = files.contents

    def exhausted(*_args, **_kwargs):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(files, "contents", exhausted)
    assert store.load(settings, HOST) is None
    with pytest.warns(AutokernWarning, match="too many open files"):
        assert store.save(settings, profile(16)) is None
    monkeypatch.setattr(files, "contents", real)
    assert path.exists()
    assert sizes(store.load(settings, HOST)) == {8}


def test_damage_is_logged_once_and_set_aside_by_the_next_save(settings, monkeypatch):
    records = []
    monkeypatch.setattr(logging.getLogger("autokern"), "handle", records.append)
    for _ in range(12):
        place(settings).write_bytes(b"damage")
        assert store.load(settings, HOST) is None
        assert names(settings, ".json") == [f"{HOST}.json"]  # looking changes nothing
    assert [record.levelname for record in records] == ["WARNING"]
    assert names(settings, ".bad") == [f"{HOST}.bad"]


# --- newer autokerns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b'{"schema":17,"anything":"else"}\nbinary\xff',
        b'{\n  "schema": 4,\n  "trials": []\n}\n',
    ],
)
def test_newer_schema_is_left_alone(settings, data):
    path = place(settings)
    path.write_bytes(data)
    assert store.load(settings, HOST) is None
    with pytest.warns(AutokernWarning, match="newer autokern"):
        assert store.save(settings, profile(16)) is None
    assert store.save(settings, profile(16)) is None  # warnings are errors here: there is no second one
    assert path.read_bytes() == data
    assert names(settings, ".bad") == names(settings, ".tmp") == []


# --- homes ----------------------------------------------------------------------------------------------------------


def test_home_is_where_the_user_says_or_the_cache_folder(monkeypatch, tmp_path):
    assert store.home(Settings(home=tmp_path)) == tmp_path
    assert store.home(Settings(home=Path("here"))) == Path.cwd() / "here"
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / name)
    assert store.home(Settings()) == tmp_path / "autokern"


def test_no_home_means_memory_only_and_no_stray_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: Path("~/.cache") / name)
    assert store.home(Settings()) is None
    assert store.load(Settings(), HOST) is None
    with pytest.warns(AutokernWarning, match="no cache folder"):
        assert store.save(Settings(), profile(8)) is None
    assert store.clear(Settings()) == []
    with store.calibrating(Settings(), HOST, "qr") as granted:
        assert granted
    assert list(tmp_path.iterdir()) == []

    def nobody(_name):
        raise RuntimeError("Could not determine home directory")

    monkeypatch.setattr(platformdirs, "user_cache_path", as_if_of_autokern(nobody))
    assert store.home(Settings()) is None


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda home: home.chmod(0o720), "chmod"),
        (lambda home: home.chmod(0o702), "chmod"),
        pytest.param(lambda home: os.chown(home, 12345, -1), "another user", marks=as_root),
    ],
)
def test_home_that_others_may_write_is_not_used(settings, spoil, told):
    path = place(settings)
    before = path.read_bytes()
    spoil(settings.home)
    assert store.load(settings, HOST) is None
    with pytest.warns(AutokernWarning, match=told):
        assert store.save(settings, profile(16)) is None
    with pytest.raises(ProfileError, match="asked to clear"):
        store.clear(settings)
    settings.home.chmod(0o700)
    assert path.read_bytes() == before


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
        assert sizes(store.load(there, HOST)) == {8}  # one's own link is fine
    os.chown(link, 12345, -1, follow_symlinks=False)
    assert store.load(there, HOST) is None
    with pytest.warns(AutokernWarning, match="another user"):
        assert store.save(there, profile(16)) is None
    assert sizes(store.load(settings, HOST)) == {8}
    assert not (tmp_path / "gone").exists()


@no_root
def test_read_only_home_is_read(settings):
    place(settings)
    settings.home.chmod(0o500)
    assert sizes(store.load(settings, HOST)) == {8}
    with pytest.warns(AutokernWarning):
        assert store.save(settings, profile(16)) is None
    with store.calibrating(settings, HOST, "exotic") as granted:
        assert granted
    settings.home.chmod(0o700)


# --- storage that fails ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["open", "write", "fsync", "close", "replace"])
def test_failing_storage_keeps_the_old_profile(settings, monkeypatch, call, number):
    place(settings)
    real = getattr(os, call)

    def failing(*args, **kwargs):
        if call == "open" and not args[1] & os.O_EXCL:
            return real(*args, **kwargs)
        if call == "close":
            fd_of_file = stat.S_ISREG(os.fstat(args[0]).st_mode) and os.fstat(args[0]).st_size > 0
            real(*args)
            if not fd_of_file or len(names(settings, ".tmp")) == 0:
                return None
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, failing)
    with pytest.warns(AutokernWarning):
        assert store.save(settings, profile(16)) is None
    assert store.save(settings, profile(32)) is None
    monkeypatch.undo()
    assert sizes(store.load(settings, HOST)) == {8}
    assert names(settings, ".tmp") == []


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_short_writes_are_continued(settings, monkeypatch, chunk):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:chunk]))
    assert store.save(settings, profile(8)) is not None
    assert sizes(store.load(settings, HOST)) == {8}


def test_a_folder_that_cannot_be_synced_is_no_trouble(settings, monkeypatch):
    real = os.fsync

    def files_only(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(fd)

    monkeypatch.setattr(os, "fsync", files_only)
    assert store.save(settings, profile(8)) is not None


def test_stale_temporaries_are_swept(settings):
    place(settings)
    old, young, alien = (
        settings.home / name for name in (f"{HOST}.{'0' * 16}.tmp", f"{HOST}.{'1' * 16}.tmp", "my.tmp")
    )
    for path in (old, young, alien):
        path.touch()
    for path in (old, alien):
        os.utime(path, (0, time.time() - 7200))
    store.save(settings, profile(16))
    assert [path.exists() for path in (old, young, alien)] == [False, True, True]


# --- strict ---------------------------------------------------------------------------------------------------------


def test_strict_raises(settings):
    strict = Settings(home=settings.home, strict=True)
    assert store.load(strict, HOST) is None  # nothing there is no trouble
    place(settings).write_bytes(b"damage")
    with pytest.raises(ProfileError, match=r"asked for .*found: .*damaged"):
        store.load(strict, HOST)
    nowhere = Settings(home=Path("/dev/null/autokern"), strict=True)
    with pytest.raises(ProfileError, match=r"asked to .*found: "):
        store.save(nowhere, profile(8))


# --- several writers ------------------------------------------------------------------------------------------------

WRITER = """
from pathlib import Path
from autokern.tuning import store; from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.tuning.profile import Profile, Timing, Trial
who = int(sys.argv[1]); settings = Settings(home=Path({home!r}), strict=True)
sys.stdin.readline()
for i in range({keys}):
    trial = Trial(Problem(op="qr", m=who + 1, n=i + 1), {{"stock": Timing(1.0)}})
    store.save(settings, Profile(fingerprint={host!r}, trials=[trial]))
"""


def test_concurrent_writers_lose_no_key(settings):
    writers, keys = 16, 5
    code = BARE + WRITER.format(home=str(settings.home), keys=keys, host=HOST)
    start = [sys.executable, "-S", "-c", code]
    crowd = [subprocess.Popen([*start, str(who)], stdin=subprocess.PIPE, text=True) for who in range(writers)]
    for writer in crowd:  # all are past their imports before the first one writes
        writer.stdin.write("go\n")
        writer.stdin.close()
    assert [writer.wait(timeout=60) for writer in crowd] == [0] * writers
    found = {(trial.problem.m, trial.problem.n) for trial in store.load(settings, HOST).trials}
    assert found == {(who + 1, i + 1) for who in range(writers) for i in range(keys)}
    assert names(settings, ".tmp") == names(settings, ".bad") == []


def test_save_does_not_wait_for_a_stuck_lock(settings, monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE", 0.1)
    place(settings)
    with files.Folder(settings.home, private=True).locked(f"{HOST}.lock") as held:
        assert held
        before = time.monotonic()
        assert store.save(settings, profile(16)) is not None
        assert time.monotonic() - before < 5
    assert sizes(store.load(settings, HOST)) == {8, 16}


def test_killed_writers_leave_the_old_profile_and_one_temporary(settings):
    place(settings)
    code = (
        f"{BARE}\nimport os, time\n"
        "from pathlib import Path; from autokern.tuning import store; from autokern.tuning.profile import Profile\n"
        "from autokern.core.settings import Settings\n"
        "os.fsync = lambda fd: os.kill(os.getpid(), 9)\n"
        f"store.save(Settings(home=Path({str(settings.home)!r})), Profile(fingerprint={HOST!r}))\n"
    )
    assert python("-S", "-c", code).returncode == -9
    assert len(names(settings, ".tmp")) == 1
    assert sizes(store.load(settings, HOST)) == {8}
    store.save(settings, profile(16))
    assert sizes(store.load(settings, HOST)) == {8, 16}


# --- the right to calibrate -----------------------------------------------------------------------------------------


def test_the_right_is_exclusive_between_processes_and_ends_with_a_crash(settings):
    code = (
        f"{BARE}\n"
        "from pathlib import Path; from autokern.tuning import store; from autokern.core.settings import Settings\n"
        f"with store.calibrating(Settings(home=Path({str(settings.home)!r})), {HOST!r}, 'qr') as granted:\n"
        "    print(granted, flush=True); sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-S", "-c", code], **pipes) as other:
        assert other.stdout.readline() == "True\n"
        with store.calibrating(settings, HOST, "qr") as granted:
            assert not granted
        other.kill()
        other.wait()
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


# --- files that the user names --------------------------------------------------------------------------------------


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
    assert store.read_file(plain) == store.read_file(place(settings)) == profile(8)
    (tmp_path / "link.json").symlink_to(plain)
    assert store.read_file(tmp_path / "link.json") == profile(8)


def test_a_copy_that_is_pinned_is_in_force_on_any_host_and_nothing_is_written(settings, monkeypatch, tmp_path):
    copy = tmp_path / "copy.json"
    copy.write_bytes(place(settings).read_bytes())
    pinned = Settings(home=tmp_path / "none", profile=copy)
    monkeypatch.setattr(files.Folder, "open", None)
    assert store.in_force(pinned, "0" * 32) == profile(8)
    assert not pinned.home.exists()
    assert store.origin(pinned, HOST) == f"pinned by AUTOKERN_PROFILE:\n{copy}"
    for path in (tmp_path, tmp_path / "gone.json"):
        with pytest.raises(ProfileError, match=f"asked for the profile in {path}; found: .* Name one file"):
            store.in_force(Settings(profile=path, strict=True), HOST)


def test_without_a_pinned_file_the_home_folder_is_read_unless_decisions_must_not_change(settings):
    file = place(settings)
    assert store.in_force(settings, HOST) == profile(8)
    assert store.origin(settings, HOST) == f"kept in\n{file}"
    frozen = msgspec.structs.replace(settings, deterministic=True)
    pinned = msgspec.structs.replace(frozen, profile=file)
    assert [store.leaves_aside(each) for each in (settings, frozen, pinned)] == [False, True, False]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        *((data, r"asked for .*found: .*calibrate --output") for data in (b"", b"{", b"[]", b'{"schema":3}')),
        (b'{"schema":3,"sums":[1]}', "a newer autokern wrote it .*upgrade"),
        (b'{\n  "schema": 12,\n', "a newer autokern wrote it .*upgrade"),
    ],
)
def test_a_named_file_that_is_no_profile_raises(tmp_path, data, told):
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(ProfileError, match=told):
        store.read_file(path)
    assert path.read_bytes() == data


@pytest.mark.parametrize("data", [b'{"schema":1,"trials":[]}', b'{"schema": 1, "sha256": "00"}\n{}'])
def test_a_file_of_an_earlier_autokern_is_set_aside_with_one_sentence(settings, tmp_path, data):
    path = place(settings)
    path.write_bytes(data)
    refused(settings)
    assert (settings.home / f"{HOST}.bad").read_bytes() == data
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ProfileError, match=r"an earlier autokern wrote it .*measure again"):
        store.read_file(tmp_path / "file")


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
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    with pytest.raises(ProfileError):
        store.write_file(link, profile(16))
    assert real.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_clear_removes_what_is_ours_and_nothing_else(settings):
    assert store.clear(settings) == []
    place(settings).write_bytes(b"damage")
    store.load(settings, HOST)
    place(settings)
    with store.calibrating(settings, HOST, "qr"):
        pass
    (settings.home / f"{HOST}.{'0' * 16}.tmp").touch()
    alien = [settings.home / name for name in ("notes.json", "x.lock", "a.tmp", f"{HOST}.json.orig", f"{HOST}.txt")]
    for path in alien:
        path.touch()
    assert len(store.clear(settings)) == 5
    assert sorted(settings.home.iterdir()) == sorted(alien)
