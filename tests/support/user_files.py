"""A user's folder: modules and files that a test writes and that are imported as a user's own."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl.utils.user_code import load_function


@contextmanager
def enter_user_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], Path]]:
    """Make a folder the current one, and yield a function that writes a file into it.

    @pytest.fixture
    def write(tmp_path, monkeypatch):
        with enter_user_folder(tmp_path, monkeypatch) as write:
            yield write
    """
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    load_function.cache_clear()

    def write(name: str, text: str) -> Path:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return file

    try:
        yield write
    finally:
        # The next test writes modules of the same names.
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(f"{folder}/"):
                del sys.modules[name]
        load_function.cache_clear()
