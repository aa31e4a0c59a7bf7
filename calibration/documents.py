"""Blocks of documents that scripts write: what stands between ``<!-- name: ... -->`` and ``<!-- /name -->``."""

from __future__ import annotations

import re
from pathlib import Path


def refresh(document: Path, name: str, block: str, check: bool) -> bool:
    """Write a block into a document, or with `check` write nothing; return whether it stood there already.

    Raises
    ------
    ValueError
        If the document does not hold exactly one pair of its markers, in order.
    """
    text = document.read_text(encoding="utf-8")
    fresh, places = re.subn(
        rf"(<!-- {name}: [^>]*-->\n).*?(<!-- /{name} -->)",
        lambda found: found[1] + block + found[2],
        text,
        flags=re.DOTALL,
    )
    if places != 1:
        raise ValueError(f"{document.name} has {places} places for {name}: expected <!-- {name}: ... --> and its end")
    if not check:
        document.write_text(fresh, encoding="utf-8")
    return fresh == text
