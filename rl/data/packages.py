"""Packages that only some tasks need, imported when such a task is built."""

from __future__ import annotations

import importlib
from types import ModuleType


def import_for_tasks(module: str, *, needed_by: str) -> ModuleType:
    """A module of a package that the optional group `tasks` installs.

    Raises:
        ValueError: it is not installed; the message says what installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise  # something that the package itself lacks
        raise ValueError(
            f"{needed_by} needs the package {package!r}, which is not installed: "
            "python3 tools/setup_env.py tasks, or pip install 'relay-rl[tasks]'"
        ) from error
