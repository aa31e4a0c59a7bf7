"""A hook of mkdocs: every `docs/tutorials/*.py` is executed as a notebook and becomes a page with its outputs."""

from __future__ import annotations

import base64
import functools
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient

LIMIT = 300
"""Seconds that a cell may take."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put a page, its figures and the executed notebook in the place of each tutorial."""
    for source in [file for file in files if file.src_uri.startswith("tutorials/") and file.src_uri.endswith(".py")]:
        name = source.src_uri.removesuffix(".py")
        notebook = executed(source.content_string)
        files.remove(source)
        page, figures = rendered(notebook, Path(name).name)
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
            lines += [*_shown(output, name, figures), ""]
    lines.append(f"[This page as an executed notebook]({name}.ipynb).")
    return "\n".join(lines), figures


def _shown(output: Any, name: str, figures: dict[str, bytes]) -> Iterator[str]:
    data = output.get("data", {})
    if "image/png" in data:
        figure = f"{name}_{len(figures) + 1}.png"
        figures[figure] = base64.b64decode(data["image/png"])
        yield f"![{data.get('text/plain', 'figure')}]({figure})"
    elif "text/html" in data:
        yield " ".join(data["text/html"].split())
    else:
        text = output.get("text") or data.get("text/plain", "")
        yield f'```text title="{"stderr" if output.get("name") == "stderr" else "output"}"\n{text.rstrip()}\n```'
