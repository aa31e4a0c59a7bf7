"""Let an uninstalled checkout have its entry points: without them autokern loads no optional candidates."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def written(folder: Path) -> Path:
    """Write the metadata of an installed package with the entry points of pyproject.toml; return its folder."""
    found: dict[str, list[str]] = {}
    group = None
    for line in PROJECT.read_text(encoding="utf-8").splitlines():  # Python 3.10 reads no TOML
        if line.startswith("["):
            _, quoted, name = line.partition("[project.entry-points.")
            group = name.strip('"]') if quoted else None
        elif group and "=" in line:
            found.setdefault(group, []).append(line.replace('"', ""))
    metadata = folder / "autokern-0+checkout.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: autokern\nVersion: 0+checkout\n", encoding="utf-8")
    text = "\n".join(f"[{group}]\n" + "\n".join(lines) for group, lines in found.items())
    (metadata / "entry_points.txt").write_text(text + "\n", encoding="utf-8")
    return metadata


def main(arguments: Sequence[str]) -> int:
    """Write into a folder, unless autokern is installed; 0 is fine, 1 something that it needs is missing."""
    sys.path[:] = [place for place in sys.path if place != arguments[0]]
    if not any(p.value.startswith("autokern.") for p in importlib.metadata.entry_points(group="autokern.candidates")):
        written(Path(arguments[0]))
    missing = []
    for name in (
        "torch",
        "gpytorch",
        "linear_operator",
        "msgspec",
        "platformdirs",
        "rich",
        "scipy",
        "sklearn",
        "pytest",
    ):
        try:
            __import__(name)
        except ImportError as error:
            missing.append(str(error))
    for line in missing:
        print(line, file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
