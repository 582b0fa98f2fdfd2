"""Docstrings that open with a word that hides the subject; tests/test_architecture.py bounds their
share.

A docstring that opens with "Of", "What" or "Whether" names no subject and no action. A function's
docstring is an imperative sentence, a class's names the concept, a field's is a noun phrase.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

BAD_OPENING = re.compile(
    r"(Of|What|Whether|Whose|Who|Whoever|Those|As|Where|How|By|With|From|So|Its|Their|In|Within|Beside|Until|When|Also"
    r"|None)\b"
)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string that stands as a statement: docstrings, also those of
    fields.
    """
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value.strip()


def bad_openings(folders: Sequence[Path]) -> tuple[list[str], int]:
    """Return the docstrings with a bad opening, as `path:line text`, and the number of all
    docstrings.
    """
    bad, total = [], 0
    for folder in folders:
        for path in [folder] if folder.is_file() else sorted(folder.rglob("*.py")):
            for line, text in docstrings(path.read_text()):
                total += 1
                if BAD_OPENING.match(text):
                    bad.append(f"{path}:{line} {text.splitlines()[0][:80]}")
    return bad, total
