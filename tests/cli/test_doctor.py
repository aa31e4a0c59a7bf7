"""Doctor: what it says of machines that work and of machines that do not."""

import json
import os

import msgspec
import pytest
import torch
from gpytorch.kernels import RBFKernel
from typer.testing import CliRunner

from autokern.cli import doctor
from autokern.cli.commands import app
from autokern.core.problem import Problem
from autokern.core.registry import plugins
from autokern.core.settings import Settings
from autokern.runtime import dispatch
from autokern.system import host
from autokern.tuning import store
from autokern.tuning.profile import Profile, Timing, Trial

PROFILE = Profile(trials=[Trial(Problem(op="qr"), {"stock": Timing(1e-3)})], created="2026-01-02T03:04:05Z")


def test_everything_is_looked_at_and_hooks_are_really_tried():
    dispatch.reset()
    told = CliRunner().invoke(app, ["doctor", "--json"])
    found = {f["name"]: f for f in json.loads(told.stdout)["checks"]}
    names = {"versions", "environment", "cache folder", "profile", "threads", "BLAS", "GPU", "TF32", "hooks"}
    assert names <= set(found)
    assert found["hooks"]["status"] == "ok", found["hooks"]
    assert torch.__version__ in found["versions"]["found"]
    assert "numpy: " in found["BLAS"]["found"]
    problems = [f for f in found.values() if f["status"] == "problem"]
    assert told.exit_code == (1 if problems else 0)
    assert all(f["advice"] for f in problems)


def test_hooks_that_give_other_values_or_fail_are_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "_agrees", lambda device: False)
    assert (doctor._hooks().status, "differs from stock on cpu" in doctor._hooks().found) == ("problem", True)

    def fails(device):
        raise RuntimeError("no\nsecond line")

    monkeypatch.setattr(doctor, "_agrees", fails)
    assert (doctor._hooks().status, doctor._hooks().found) == ("problem", "RuntimeError: no")


def test_functions_that_the_program_replaced_are_named_with_what_to_do_though_no_call_has_relied_on_them(monkeypatch):
    monkeypatch.setattr(RBFKernel, "forward", lambda self, x1, x2, **params: None)
    monkeypatch.setattr("gpytorch.kernels.rbf_kernel.postprocess_rbf", lambda distances: distances)
    monkeypatch.setattr("botorch.models.transforms.input.AffineInputTransform._transform", lambda self, x: x)
    finding = doctor._versions()
    assert finding.status == "note"
    assert "RBFKernel.forward was replaced by code from elsewhere" in finding.found
    assert "rbf_kernel:postprocess_rbf was replaced" in finding.found
    assert "AffineInputTransform._transform was replaced" in finding.found
    assert finding.found.count("was replaced") == 3, finding.found
    assert finding.advice.startswith("take out what replaces them, or set AUTOKERN_UNKNOWN=trust")


def test_findings_are_printed_with_advice(monkeypatch):
    monkeypatch.setenv("AUTOKERN_BUDGET", "soon")
    told = CliRunner().invoke(app, ["doctor"])
    assert told.exit_code == 1
    assert "✗" in told.output
    assert "→ correct or unset it" in told.output
    assert "1 problem" in told.output


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("AUTOKERN_BUDGET", "soon", "problem"),
        ("AUTOKERN_BUGDET", "10", "problem"),
        ("AUTOKERN", "0", "note"),
        ("WORLD_SIZE", "4", "note"),
        ("AUTOKERN_LOG", "info", "ok"),
    ],
)
def test_environment(monkeypatch, name, value, status):
    monkeypatch.setenv(name, value)
    finding, _ = doctor._environment(os.environ)
    assert finding.status == status
    assert name == "WORLD_SIZE" or name in finding.found


def test_a_cache_that_cannot_be_written_or_that_others_can_write(tmp_path):
    (tmp_path / "file").write_text("in the way")
    found = doctor._cache(Settings(home=tmp_path / "file" / "home"))
    assert [(f.name, f.status) for f in found] == [("cache folder", "problem")]
    assert "AUTOKERN_HOME" in found[0].advice
    assert doctor._cache(Settings(home=tmp_path / "new"))[0].status != "problem"
    assert list((tmp_path / "new").iterdir()) == [], "looking leaves nothing behind"
    (tmp_path / "new").chmod(0o777)
    assert os.name == "nt" or doctor._cache(Settings(home=tmp_path / "new"))[0].status == "problem"


def test_profile_present_absent_foreign_and_damaged(tmp_path):
    settings = Settings(home=tmp_path / "home")
    here = host.current()
    assert doctor._cache(settings)[1].status == "note"
    store.save(settings, msgspec.structs.replace(PROFILE, host=here.fields, fingerprint="0" * 32))
    foreign = doctor._cache(settings)[1]
    assert (foreign.status, "nothing was measured" in foreign.found) == ("note", True)
    trials = [Trial(Problem(op="qr"), {"stock": Timing(1e-3, disturbed=0.2)})]
    store.save(settings, Profile(trials=trials, host=here.fields, fingerprint=here.fingerprint))
    kept = doctor._cache(settings)[1]
    assert (kept.status, "1 problems of 1 ops, 1 disturbed" in kept.found) == ("note", True)
    store.save(settings, msgspec.structs.replace(PROFILE, host=here.fields, fingerprint=here.fingerprint))
    kept = doctor._cache(settings)[1]
    assert (kept.status, "1 problems of 1 ops, last" in kept.found, "2026-01-02" in kept.found) == ("ok", True, True)
    (settings.home / f"{here.fingerprint}.json").write_bytes(b"{}")
    for _ in range(2):  # looking changes nothing
        assert doctor._cache(settings)[1].status == "problem"


def test_a_pinned_profile_is_named_whatever_host_it_is_of(tmp_path):
    file = tmp_path / "paper.json"
    settings = Settings(home=tmp_path / "home", profile=file)
    store.write_file(file, msgspec.structs.replace(PROFILE, levels={"qr/float64@cpu": "quick"}))
    found = doctor._cache(settings)[1]
    assert (found.status, f"pinned by AUTOKERN_PROFILE: {file}" in found.found) == ("ok", True)
    store.write_file(file, msgspec.structs.replace(PROFILE, trials=[]))
    found = doctor._cache(settings)[1]
    assert (found.status, str(file) in found.found, found.advice) == ("note", True, "unset AUTOKERN_PROFILE")
    file.unlink()
    found = doctor._cache(settings)[1]
    assert (found.status, str(file) in found.found, found.advice) == ("problem", True, "mend AUTOKERN_PROFILE")


@pytest.mark.parametrize(
    ("used", "ceiling", "threads", "status"),
    [(8, 4, "auto", "note"), (8, 4, "off", "problem"), (4, 4, "auto", "ok"), (2, 4, "auto", "note")],
)
def test_threads_against_what_may_run(monkeypatch, used, ceiling, threads, status):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: used)
    monkeypatch.setattr(host, "thread_ceiling", lambda: ceiling)
    assert doctor._threads(Settings(threads=threads)).status == status


@pytest.fixture
def precisions():
    """The settings of float32 products, as torch has them when the test is over."""
    flags = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [one.fp32_precision for one in flags]
    yield flags
    for one, precision in zip(flags, before, strict=True):
        one.fp32_precision = precision


@pytest.mark.parametrize(
    ("set_", "words"),
    [
        (lambda flags: torch.set_float32_matmul_precision("high"), ()),
        (lambda flags: setattr(flags[0], "fp32_precision", "tf32"), ("tf32 on", "CUDA")),
        (lambda flags: setattr(flags[1], "fp32_precision", "bf16"), ("bf16 on", "CPU")),
    ],
)
def test_tf32_is_a_problem_by_whichever_api_it_was_set(precisions, set_, words):
    """torch's older functions raise once the newer ones were used."""
    assert doctor._tf32().status == "ok"
    set_(precisions)
    found = doctor._tf32()
    assert found.status == "problem"
    assert all(word in found.found for word in words)


def test_a_plugin_is_judged_by_the_accelerator_if_there_is_one(monkeypatch):
    here = host.current()
    monkeypatch.setattr(host, "current", lambda: msgspec.structs.replace(here, devices=("cpu", "cuda")))
    found = {plugin.source: doctor._of_plugin(plugin) for plugin in plugins()}
    graphs = found["cuda_graphs"]
    assert "AUTOKERN_GRAPHS=on allows it" in graphs.found, "not why the CPU has no graphs"
    if "available" in found["keops"].found:
        assert "available on cpu only; KeOps" in found["keops"].found
