"""Reports: what a program or a profile tells, as one HTML file that needs nothing beside it.

`facts` makes the content of a page, which `page.html` shows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from autokern.cli.notebook import installed
from autokern.cli.report.facts import of_profile, of_program
from autokern.core.errors import AutokernError, ProfileError
from autokern.system.files import write_whole

__all__ = ["check", "of_profile", "of_program", "put", "write"]


def check(file: Path, option: str) -> None:
    """Raise AutokernError where a page cannot be made or written."""
    installed("jinja2", option)  # and imported: when a program ends it may be too late
    put(file, None)


def put(file: Path, content: bytes | None) -> None:
    """Write a file that the user named, all or nothing; without content, only try whether that would work."""
    try:
        write_whole(file, content)
    except (OSError, ProfileError) as error:
        found = getattr(error, "strerror", None) or error
        raise AutokernError(f"asked to write {file}; found: {found}. Name another file") from None


def write(file: Path, page: dict[str, Any]) -> None:
    """Write a page to a file, all or nothing."""
    import jinja2
    import markupsafe

    def marked(text: str) -> markupsafe.Markup:
        """Return text as HTML, with what stands between backticks as code."""
        return markupsafe.Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(text))))

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    options: Any = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(loader=loader, **options)
    environment.globals.update(marked=marked)
    put(file, environment.get_template("page.html").render(page=page).encode())
