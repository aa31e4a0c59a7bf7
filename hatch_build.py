"""The README as an index shows it: it has no files beside it, so links to those are absolute, or plain text."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")


def for_an_index(text: str, source: str = "") -> str:
    """Return the README with links into the repository at `source`, or without where none is stated."""
    return _LINK.sub(lambda found: f"[{found[1]}]({source}/{found[2]})" if source else found[1], text)


class Readme(MetadataHookInterface):
    """Give the metadata that README."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field `readme`; `project.urls.Source` says where the files are."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source", "")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_an_index(text, source)}
