"""Packages that only some tasks need, imported when such a task is built, and the settings passed to them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any


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


def decode_settings(settings: Mapping[str, Any], *, name: str = "settings") -> dict[str, Any]:
    """Settings as a package takes them: a text that starts with `[` or `{` is read as JSON, so that lists and
    nested settings can be written on the command line.

    Raises:
        ValueError: such a text is no JSON.
    """
    decoded = {}
    for key, value in settings.items():
        decoded[key] = value
        if isinstance(value, str) and value[:1] in ("[", "{"):
            try:
                decoded[key] = json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"{name}.{key}={value!r}: starts like JSON, but is not: {error}") from error
    return decoded
