"""Reports on a program or a profile, each one self-contained HTML file.

`facts` makes the content of a page; `page.html` is its template.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from autokern.cli.notebook import installed
from autokern.cli.report.facts import of_profile, of_program
from autokern.system.files import write_whole

__all__ = ["check", "of_profile", "of_program", "write"]


def check(file: Path, option: str) -> None:
    """Raise AutokernError if a page cannot be made or written."""
    installed("jinja2", option)  # imported now: at the end of a program it may be too late
    write_whole(file, None)


def write(file: Path, page: dict[str, Any]) -> None:
    """Render a page and write it atomically."""
    import jinja2
    import markupsafe

    def marked(text: str) -> markupsafe.Markup:
        """Return text as HTML, with text between backticks as code."""
        return markupsafe.Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(text))))

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    options: Any = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(loader=loader, **options)
    environment.globals.update(marked=marked)
    write_whole(file, environment.get_template("page.html").render(page=page).encode())
