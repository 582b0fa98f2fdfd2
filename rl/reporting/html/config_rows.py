"""Every option of a run, and what is different in it from the function that its config came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rl.config.changes import leaves
from rl.config.registry import resolve
from rl.config.serialize import to_dict
from rl.config.tree import ConfigError


def config_rows(config: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """Of a config.json: `path`, `value` and, where it differs, `default` of each option, values as JSON
    texts; and why nothing is known of the defaults.

    The registry function is called as it is now: it may have changed since the run.
    """
    values = dict(leaves(config.get("values") or {}))
    base, problem = _defaults(config)
    rows = []
    for path, value in values.items():
        row = {"path": path, "value": _said(value)}
        if base is not None and (default := _said(base[path]) if path in base else "absent") != row["value"]:
            row["default"] = default
        rows.append(row)
    return rows, problem


def _defaults(config: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    module, function = str(config.get("module")), str(config.get("config"))
    try:
        return dict(leaves(to_dict(resolve(module, function).config))), None
    except (ConfigError, ImportError, TypeError, ValueError) as error:
        return None, f"what differs from {module}.{function} is not known: {error}"


def _said(value: Any) -> str:
    return json.dumps(value)
