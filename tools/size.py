"""Files, lines and code lines of each folder, and of everything that the sum-digits run imports:
`make size`.

Code lines are those with at least one token that is neither a comment nor part of a docstring.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path

PRODUCT = ("losses", "rl", "actors", "configs", "relay")
OTHERS = ("examples", "benchmarks", "tools", "tests")
ENTRIES = ("rl/simple_grpo_sum_digits.py", "configs/sum_digits.py")
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def num_code_lines(source: str) -> int:
    """Return the number of lines without blanks, comments and docstrings."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def imported_files(entries: Iterable[Path]) -> set[Path]:
    """Return the files of this project that the entries import, directly or not, entries
    included.
    """
    found: set[Path] = set()
    pending = list(entries)
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                module = Path(*name.split("."))
                pending += [
                    p for p in (module.with_suffix(".py"), module / "__init__.py") if p.exists()
                ]
    return found


def measure(paths: Iterable[Path]) -> tuple[int, int, int]:
    """Return the number of files, lines and code lines."""
    sources = [path.read_text() for path in paths]
    return (
        len(sources),
        sum(text.count("\n") for text in sources),
        sum(map(num_code_lines, sources)),
    )


def main(names: Sequence[str]) -> None:
    """Print the table; `names` are other entries than those of sum-digits."""
    sizes = {folder: measure(Path(folder).rglob("*.py")) for folder in (*PRODUCT, *OTHERS)}
    files, lines, code = (sum(sizes[folder][column] for folder in PRODUCT) for column in range(3))
    rows = {
        **sizes,
        "product": (files, lines, code),
        "RL path": measure(imported_files(Path(name) for name in names or ENTRIES)),
    }
    print(f"{'folder':<12}{'files':>8}{'lines':>9}{'code':>9}")
    for name, (files, lines, code) in rows.items():
        print(f"{name:<12}{files:>8}{lines:>9}{code:>9}")
    print(
        f"product: {', '.join(PRODUCT)}; RL path: {' and '.join(names or ENTRIES)} with all their "
        "imports"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
