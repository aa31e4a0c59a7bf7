"""A hook of mkdocs: every `docs/tutorials/*.py` is executed as a notebook and becomes a page with its outputs.

Pages for readers of the repository lie beside the programs. Run as a script, this file writes them again; `--check`
runs nothing, and compares their text and code with the programs.
"""

from __future__ import annotations

import base64
import functools
import io
import os
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import PIL.Image
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parents[1] / "docs/tutorials"
LIMIT = 300
"""Seconds that a cell may take."""
_OUTPUT = re.compile(r"^(```text title=.*?^```|!\[.*?)\n\n", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put a page, its figures and the executed notebook in the place of each tutorial."""
    there = [file for file in files if file.src_uri.startswith("tutorials/")]
    for file in there:
        files.remove(file)  # the committed pages, too
    for source in [file for file in there if file.src_uri.endswith(".py")]:
        name = source.src_uri.removesuffix(".py")
        notebook = executed(source.content_string)
        page, figures = rendered(notebook, Path(name).name)
        page += f"[This page as an executed notebook]({Path(name).name}.ipynb).\n"
        files.append(File.generated(config, f"{name}.ipynb", content=nbformat.writes(notebook)))
        files.append(File.generated(config, f"{name}.md", content=page))
        for figure, content in figures.items():
            files.append(File.generated(config, f"tutorials/{figure}", content=content))
    return files


@functools.cache  # `mkdocs serve` builds again when another page changes
def executed(text: str) -> Any:
    """Return the notebook of a tutorial with its outputs, run in a home without measurements.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        If a cell raises.
    ValueError
        If an output names this host or one of its folders.
    """
    notebook = jupytext.reads(text, fmt="py:percent")
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "AUTOKERN_HOME": home, "PYTHONPATH": os.pathsep.join(_paths())}
        NotebookClient(notebook, timeout=LIMIT, kernel_name="python3").execute(env=environment, cwd=home)
        private = {home, f"{Path.home()}/", str(Path.cwd())}
        if len(host := socket.gethostname()) > 5:  # a shorter one may be a word
            private.add(host)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
        for output in cell.get("outputs", ()):
            told = next((word for word in private if word in str(output)), None)
            if told is not None:
                raise ValueError(f"an output of a tutorial tells {told!r}, which is this machine's: {output}")
    return notebook


def _paths() -> list[str]:
    return [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]


def rendered(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its figures by file name."""
    lines, figures = [], dict[str, bytes]()
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            lines += [cell.source, ""]
            continue
        lines += ["```python", cell.source, "```", ""]
        for output in cell.outputs:
            lines += [_shown(output, name, figures), ""]
    return "\n".join([*lines, ""]), figures


def _shown(output: Any, name: str, figures: dict[str, bytes]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        figure = f"{name}_{len(figures) + 1}.png"
        figures[figure] = _small(base64.b64decode(data["image/png"]))
        return f"![What the cell draws]({figure})"
    text = output.get("text") or data.get("text/plain", "")
    return f'```text title="{"stderr" if output.get("name") == "stderr" else "output"}"\n{text.rstrip()}\n```'


def _small(png: bytes) -> bytes:
    """Return a figure in 256 colours, without the version of the program that drew it."""
    found = io.BytesIO()
    PIL.Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=PIL.Image.Dither.NONE).save(
        found, "png", optimize=True
    )
    return found.getvalue()


def main(check: bool) -> int:
    """Write the pages of the repository, or tell which of them is not its program's; return the exit status."""
    stale = []
    for program in sorted(TUTORIALS.glob("*.py")):
        page, text = program.with_suffix(".md"), program.read_text()
        last = f"The program of this page: [{program.name}]({program.name}).\n"
        if check:
            told = page.read_text() if page.exists() else ""
            figures = set(re.findall(r"^!\[.*\]\((.*)\)$", told, re.MULTILINE))
            drawn = {figure.name for figure in TUTORIALS.glob(f"{program.stem}_*.png")}
            plain, _ = rendered(jupytext.reads(text, fmt="py:percent"), program.stem)
            stale += [page.name] if _OUTPUT.sub("", told) != plain + last or figures != drawn else []
            continue
        told, made = rendered(executed(text), program.stem)
        page.write_text(told + last)
        for name, content in made.items():
            (TUTORIALS / name).write_bytes(content)
    if stale:
        print(f"stale: {', '.join(stale)}; `python .ci/notebooks.py` writes them", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
