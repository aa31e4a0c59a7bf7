"""settings.py: every variable and every argument of `using`, good values and bad ones."""

import inspect
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autokern
from autokern.core.errors import SettingsError
from autokern.core.settings import ROWS, Settings, from_environment, parse_bytes, revised

VARIABLES = {row.variable: row.meaning for row in ROWS}
DOCS = Path(__file__).parents[2] / "docs"

NOBODY = "~no-such-user-of-this-machine/profiles"
VALUES = {
    "enabled": ({"0": False, "1": True, "off": False, "False": False, " YES ": True}, ["2", "maybe"]),
    "home": ({"/somewhere/else": Path("/somewhere/else")}, [NOBODY]),
    "profile": ({"/a/profile.json": Path("/a/profile.json")}, [NOBODY]),
    "calibrate": ({"first-use": "first-use", "Never": "never"}, ["always"]),
    "budget": ({"2.5": 2.5, "0": 0.0}, ["soon", "-1", "nan", "inf"]),
    "force": (
        {"qr=cpu": (("qr", "cpu"),), "qr=cpu, kernel_matmul=tiled": (("kernel_matmul", "tiled"), ("qr", "cpu"))},
        ["qr", "qr=", "=cpu", "qr=cpu,qr=native", "qr=cpu,", "random:", "random:x", "random:-1", "../qr=cpu"],
    ),
    "exclude": (
        {"keops,compiled": frozenset({"keops", "compiled"}), "qr=cpu,,keops ": frozenset({"qr=cpu", "keops"})},
        ["a b", "qr="],
    ),
    "accuracy": ({"approximate": "approximate", "SAME": "same"}, ["good"]),
    "max_error": ({"1e-5": 1e-5}, ["0", "1", "nan", "small"]),
    "memory": (
        {"8GiB": 8 * 2**30, "512 MB": 512 * 10**6, "1.5GiB": 3 * 2**29},
        ["lots", "0", "-8GiB", "8 parsecs", "9" * 400],
    ),
    "calls": ({"500": 500}, ["many", "-1"]),
    "threads": ({"auto": "auto", "off": "off", "3": 3}, ["0", "-2", "1.5", "all"]),
    "ranks": ({"Off": "off", "30": 30.0}, ["all", "0"]),
    "graphs": ({"on": "on"}, ["maybe"]),
    "deterministic": ({"1": True}, ["3"]),
    "strict": ({"on": True}, ["perhaps"]),
    "workers": ({"0": False}, ["two"]),
    "replay": ({"0": False}, ["two"]),
    "log": ({"debug": "debug"}, ["loud"]),
    "unknown": ({"Trust": "trust", "stock": "stock"}, ["some"]),
}
"""Of each field the texts that its variable may have, and some that it may not."""
NAMES = {row.field: row.variable for row in ROWS}
GOOD = [(NAMES[field], text, field, value) for field, (good, _) in VALUES.items() for text, value in good.items()]
GOOD.append(("AUTOKERN_FORCE", "random:17", "random_seed", 17))
BAD = [(NAMES[field], text) for field, (_, bad) in VALUES.items() for text in bad]


@pytest.mark.parametrize(("name", "text", "field", "value"), GOOD)
def test_good_values(name, text, field, value):
    assert from_environment({name: text}) == Settings(**{field: value})


@pytest.mark.parametrize(("name", "text"), BAD)
def test_bad_values_say_what_was_asked_and_what_the_variable_means(name, text):
    with pytest.raises(SettingsError) as caught:
        from_environment({name: text})
    message = str(caught.value)
    assert message.startswith(f"{name}={text!r}: ")
    assert VARIABLES[name] in message
    assert isinstance(caught.value, ValueError)


def test_the_docs_show_the_table():
    lines = [f"| `{row.variable}` | {row.values} | {row.meaning} |" for row in ROWS]
    told = "\n".join(["| variable | values | meaning |", "|---|---|---|", *lines])
    assert told in (DOCS / "environment.md").read_text(), f"paste this:\n{told}"


def test_each_field_but_the_seed_has_a_row_and_is_tried():
    assert {row.field for row in ROWS} == set(Settings.__struct_fields__) - {"random_seed"} == set(VALUES)
    assert set(inspect.signature(autokern.using).parameters) <= {row.field for row in ROWS}


def test_nothing_set_orders_nothing_and_unknown_variables_are_named():
    assert from_environment({}) == Settings()
    assert from_environment({"PATH": "/bin", **dict.fromkeys(VARIABLES, "  ")}) == Settings()
    with pytest.raises(SettingsError, match="AUTOKERN_FROCE") as caught:
        from_environment({"AUTOKERN_FROCE": "qr=cpu"})
    assert all(name in str(caught.value) for name in VARIABLES)


def test_home_and_profile_expand_the_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert from_environment({"AUTOKERN_HOME": "~/x"}).home == tmp_path / "x"
    assert from_environment({"AUTOKERN_PROFILE": "~/p.json"}).profile == tmp_path / "p.json"


BASE = Settings(force=(("qr", "cpu"),), exclude=frozenset({"keops"}), budget=3.0)


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ({"force": {"qr": "native"}}, {"force": (("qr", "native"),)}),
        ({"force": "qr=native,matmul=stock"}, {"force": (("matmul", "stock"), ("qr", "native"))}),
        ({"force": "matmul=stock"}, {"force": (("matmul", "stock"), ("qr", "cpu"))}),
        ({"force": "random:5"}, {"force": (), "random_seed": 5}),
        ({"exclude": "qr=cpu"}, {"exclude": {"keops", "qr=cpu"}}),
        ({"exclude": iter(["native", "qr=cpu"])}, {"exclude": {"keops", "native", "qr=cpu"}}),
        ({"memory": 1 << 20}, {"memory": 1 << 20}),
        ({"accuracy": "approximate", "memory": "4GiB"}, {"accuracy": "approximate", "memory": 4 * 2**30}),
        ({}, {}),
    ],
)
def test_an_order_replaces_that_for_the_same_op_and_random_lifts_all(orders, expected):
    assert revised(BASE, **orders) == msgspec.structs.replace(BASE, **expected)
    assert BASE.force == (("qr", "cpu"),)


NO_ORDERS = {
    "force": [{"qr": "../cpu"}, {"qr": 5}, 5, "qr", "random:x"],
    "exclude": [[5], ["a b"]],
    "accuracy": ["best", 5],
    "memory": ["much", 0, -1, True, float("inf"), "9" * 400],
    "max_error": [0, 1, -1, float("nan"), "much"],
}


@pytest.mark.parametrize(("name", "order"), [(name, order) for name in NO_ORDERS for order in NO_ORDERS[name]])
def test_revised_refuses(name, order):
    with pytest.raises(SettingsError, match=r"autokern\.using"):
        revised(Settings(), **{name: order})


@given(st.integers(1, 10**6), st.sampled_from(["", "B", "kB", "MB", "GiB", "mib", "TB", "KiB"]), st.booleans())
def test_parse_bytes_reads_whole_sizes(number, unit, space):
    scale = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    assert parse_bytes(f" {number}{' ' * space}{unit} ") == number * scale[unit.upper()]


@given(st.sampled_from(sorted(VARIABLES)), st.text(max_size=20))
def test_any_text_gives_settings_or_settings_error(name, text):
    try:
        found = from_environment({name: text})
    except SettingsError:
        return
    assert isinstance(found, Settings)
