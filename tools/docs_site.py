"""Hooks of mkdocs (mkdocs.yml): README.md is the first page, and links out of docs/ are texts.

The pages link to files of the repository, which the site does not have.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]\[]*)\]\((\.\./[^)]+)\)")
"""Link of a page to a file outside of docs/."""
README_LINK = re.compile(r"\]\((?!https?:)([^)]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add README.md as the first page."""
    files.append(File.generated(config, "index.md", content=make_index()))
    return files


def make_index() -> str:
    """Return README.md with its links as seen from docs/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    def move(match: re.Match[str]) -> str:
        target = match[1]
        in_docs = target.startswith("docs/")
        return f"]({target.removeprefix('docs/')})" if in_docs else f"](../{target})"

    return README_LINK.sub(move, text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files that the site does not have by their texts."""
    return LINK.sub(lambda match: match[1], markdown)
