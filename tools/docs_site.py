"""Hooks of mkdocs (mkdocs.yml): README.md is the first page, and links out of docs/ are texts.

The pages link to files of the repository, which the site does not have.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
OUTSIDE_LINK = re.compile(r"(?<!!)\[([^\]\[]*)\]\(\.\./[^)]+\)")
"""Link of a page to a file outside of docs/."""
README_LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")
"""End of a link of README.md to a file of the repository."""

CODE_IN_ROW = re.compile(r"(?<=[ |])`[^`\n]*\\\|[^`\n]*`")
"""Code with an escaped bar, which only rows of tables have."""


def on_files(files: Files, *, config: Any) -> Files:
    """Add README.md as the first page."""
    # Here, so that the tests of the texts need no mkdocs.
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", content=make_index()))
    return files


def make_index() -> str:
    """Return README.md with its links as seen from docs/."""

    def move(match: re.Match[str]) -> str:
        target = match[1]
        if target.startswith(DOCS):
            return f"]({target.removeprefix(DOCS)})"
        return f"](../{target})"

    return README_LINK.sub(move, (ROOT / "README.md").read_text(encoding="utf-8"))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files that the site does not have by their texts; unescape bars of code."""
    markdown = OUTSIDE_LINK.sub(lambda match: match[1], markdown)
    # GitHub ends a cell at a bar in code unless it is escaped; the site shows the backslash.
    return CODE_IN_ROW.sub(lambda match: match[0].replace("\\|", "|"), markdown)
