"""Text that is shown can be written where it goes, and is text in HTML."""

from __future__ import annotations

import io

from autokern.core import shown, units


def test_text_is_legible_in_ascii():
    assert units.legible("5 µs, 2×", io.TextIOWrapper(io.BytesIO(), encoding="ascii")) == "5 us, 2x"


def test_text_in_a_table_is_escaped():
    assert "&lt;b&gt;" in shown.table("<b>", [">n"], [["1"]])
