"""Orders: names are checked where they are given; deterministic runs leave measurements aside; switching on and off."""

import os

import msgspec
import pytest
import torch
from support.programs import python
from support.synthetic import measured

import autokern
from autokern.core.errors import SettingsError
from autokern.core.settings import Settings, from_environment
from autokern.runtime import dispatch, memo
from autokern.tuning import store
from autokern.tuning.profile import Profile

BAD = [
    ("AUTOKERN_EXCLUDE", "nonsense", "'nonsense' was excluded"),
    ("AUTOKERN_EXCLUDE", "choleskyqr", "did you mean 'choleskyqr2'"),
    ("AUTOKERN_EXCLUDE", "qr=nonsense", "op qr has no candidate 'nonsense'"),
    ("AUTOKERN_EXCLUDE", "qrr=cpu", "unknown op 'qrr'"),
    ("AUTOKERN_FORCE", "qr=nonsense", "op qr has no candidate 'nonsense'"),
]


@pytest.mark.parametrize(("name", "text", "told"), BAD)
def test_a_name_that_is_of_nothing_is_refused(name, text, told):
    before = dispatch.session()
    with pytest.raises(SettingsError, match=told):
        dispatch.reset(from_environment({name: text}))
    assert dispatch.session() is before


@pytest.mark.parametrize("text", ["keops", "broadcast,qr=choleskyqr2", "kernel_matmul=keops", "posterior=arrays"])
def test_names_of_plugins_and_of_what_is_not_installed_are_known(text):
    found = dispatch.reset(from_environment({"AUTOKERN_EXCLUDE": text}))
    assert found.settings.exclude == set(text.split(","))


ORDERS = [
    {"exclude": "zz"}, {"exclude": ["qr=zz"]}, {"force": {"qr": "zz"}}, {"force": {"zz": "cpu"}}, {"force": "qr=zz"},
    {"memory": "zz"}, {"accuracy": "zz"},
]  # fmt: skip


@pytest.mark.parametrize("orders", ORDERS)
def test_using_refuses_names_that_are_of_nothing(orders):
    with pytest.raises(SettingsError, match=r"zz|autokern.using: expected"), autokern.using(**orders):
        pytest.fail("the block must not be entered")
    assert memo.current.get() is None


def test_one_name_of_an_op_or_device_is_a_name():
    found = autokern.calibrate("cholesky", budget=0.3, devices="cpu", progress=False)
    assert {trial.problem.op for trial in found.trials} <= {"cholesky"}


def known() -> Profile:
    return measured({"choleskyqr2": 0.2}, (10, 20, 40), op="qr", tall=10)


def test_a_deterministic_run_leaves_measurements_aside_unless_they_are_pinned(tmp_path, monkeypatch):
    usual = from_environment()
    store.save(usual, known())
    dispatch.reset(usual)
    assert autokern.explain("qr", m=200, n=20).candidate == "choleskyqr2"
    monkeypatch.setenv("AUTOKERN_DETERMINISTIC", "1")
    frozen = dispatch.reset().settings
    assert autokern.profile().trials == []
    assert autokern.explain("qr", m=200, n=20).candidate == "stock"
    autokern.linalg.qr(torch.randn(200, 20, dtype=torch.float64))
    assert autokern.stats()["qr"] == {"stock": 1}
    with pytest.raises(SettingsError, match="AUTOKERN_DETERMINISTIC"):
        autokern.calibrate("qr", budget=0.1)
    file = tmp_path / "pinned.json"
    store.write_file(file, known())
    dispatch.reset(msgspec.structs.replace(frozen, profile=file))
    assert autokern.explain("qr", m=200, n=20).candidate == "choleskyqr2"
    dispatch.reset(msgspec.structs.replace(frozen, force=(("qr", "choleskyqr2"),)))
    assert autokern.explain("qr", m=200, n=20).reason == "forced by the user"


@pytest.mark.parametrize("op", ["exact_log_prob", "predict", "objective", "kernel_matmul"])
def test_a_deterministic_run_has_no_unmeasured_default(op):
    dispatch.reset(Settings(calibrate="never", deterministic=True))
    found = autokern.explain(op, n=3000)
    assert (found.candidate, found.source) in {("stock", "order"), ("stock", "only choice")}


BARE = {name: text for name, text in os.environ.items() if not name.startswith("AUTOKERN")}


def told(code: str, **variables: str) -> list[str]:
    """Run code in a process without any other variable of autokern; return the lines that it prints."""
    run = python("-W", "ignore::FutureWarning", "-c", code, check=True, env={**BARE, **variables})
    return [*run.stdout.splitlines(), *run.stderr.splitlines()]


def test_another_import_enables_again_after_disable():
    code = """
import autokern.auto, autokern
autokern.disable()
print(autokern.is_enabled(), autokern.status().why_off)
import autokern.auto
print(autokern.is_enabled(), autokern.status().why_off)
import autokern.auto
autokern.disable()
print(autokern.is_enabled())
from autokern import auto
print(autokern.is_enabled())
"""
    advice = "`import autokern.auto` or autokern.enable() enables it"
    assert told(code) == [f"False {advice}", "True ", "False", "True"]


LOOK = "import autokern.auto, autokern; print(autokern.is_enabled(), autokern.stats()); print(autokern.explain())"


@pytest.mark.parametrize(
    ("name", "why", "off"),
    [
        ("AUTOKERN_BUDGET", "AUTOKERN_BUDGET='soon': expected", "AUTOKERN_BUDGET='soon': expected"),
        pytest.param("AUTOKERN_EXCLUDE", "'soon' was excluded", "'soon' was excluded", marks=pytest.mark.slow),
    ],
)
def test_a_bad_value_is_warned_of_once_and_raises_nowhere(name, why, off):
    on, nothing, *warned = told(LOOK + "; print(autokern.status().why_off)", **{name: "soon"})
    assert (on, nothing) == ("False {}", "autokern has taken no decision in this process")
    (line,) = [line for line in warned if "AutokernWarning" in line]
    assert f"autokern stays off: {why}" in line
    assert warned[0].startswith(off)


@pytest.mark.parametrize(("text", "on"), [("1", True), ("0", False)])
def test_the_variable_switches_off_and_is_told(text, on):
    found = told(LOOK + "; print(autokern.status().why_off)", AUTOKERN=text, AUTOKERNEL_PATH="/x")
    assert found[0] == f"{on} {{}}"
    assert ("AUTOKERN=0 keeps it off" in found) != on
