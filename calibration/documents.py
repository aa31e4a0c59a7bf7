"""Blocks of documents that scripts write: what stands between ``<!-- name: ... -->`` and ``<!-- /name -->``."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


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


def served(
    parser: argparse.ArgumentParser, options: argparse.Namespace, blocks: Mapping[str, Callable[[Any], str]]
) -> int | None:
    """Do what ``--readme`` or ``--check`` asks with the JSON in ``--output``; None if neither is given.

    The document holds one of the blocks, given by name.

    0 is fine, 1 a document that does not hold the figures of the JSON; the parser ends the script where there is none.
    """
    document = options.readme or options.check
    if document is None:
        return None
    check = options.check is not None
    try:
        results = json.loads(options.output.read_text(encoding="utf-8"))
        text = document.read_text(encoding="utf-8")
        name = next((name for name in blocks if f"<!-- {name}: " in text), next(iter(blocks)))
        same = refresh(document, name, blocks[name](results), check)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if check and not same:
        print(f"{document.name} does not hold the figures of {options.output.name}: run --readme")
    return int(check and not same)
