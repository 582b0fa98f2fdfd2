"""The pages of the documentation: their blocks of code, headings and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")))
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block of Python."""

    page: str
    """Path of the page from the root."""
    number: int
    """Number of the block among those of Python on its page, from 1."""
    text: str

    @property
    def module(self) -> str | None:
        """Name of the module that the block's first line says it is."""
        match = re.match(r"# (\w+)\.py\n", self.text)
        return match and match[1]


def find_blocks() -> list[Block]:
    """Return the blocks of Python of all pages."""
    blocks = []
    for page in PAGES:
        number = 0
        for _, language, text in FENCE.findall(page.read_text()):
            if language in ("python", "py"):
                number += 1
                blocks.append(Block(page=str(page.relative_to(ROOT)), number=number, text=text))
    return blocks


def find_block(page: str, text: str) -> Block:
    """Return the only block of a page that contains a text."""
    (block,) = (b for b in find_blocks() if b.page == page and text in b.text)
    return block


def find_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them.

    Of headings with the same anchor only the first has it.
    """
    anchors = set[str]()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchors.add(re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-"))
    return anchors


def find_links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the anchor of each link of a page to a file of the repository."""
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if not re.match(r"\w+:", link):
            name, _, anchor = link.partition("#")
            yield page.parent / name if name else page, anchor
