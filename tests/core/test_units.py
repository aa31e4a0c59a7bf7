"""Text that is shown can be written where it goes."""

from __future__ import annotations

import io

from autokern.core import output


def test_text_is_legible_in_ascii():
    assert output.legible("5 µs, 2×", io.TextIOWrapper(io.BytesIO(), encoding="ascii")) == "5 us, 2x"
