"""What is different in a run's config from the file that it was started with, or its registry function."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.serialize import to_dict


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A leaf with two values, each as in config.json; None also where there is no such leaf."""

    path: str
    value: Any
    registry: Any


def differences(values: Mapping[str, Any], registry: Mapping[str, Any]) -> list[Difference]:
    """Of two configs as `to_dict` has them, one of them its registry function's."""
    ours, theirs = dict(leaves(values)), dict(leaves(registry))
    return [
        Difference(path=path, value=ours.get(path), registry=theirs.get(path))
        for path in {**theirs, **ours}
        if _said(ours, path) != _said(theirs, path)
    ]


def changed_fields(file: Path, config: Any) -> list[str]:
    """Of each field whose value is not that of a config.json: `loop.num_steps: 80 -> 160`.

    Where a run's folder was moved, its own place is none of them.
    """
    before = dict(leaves(json.loads(file.read_text())["values"]))
    after = dict(leaves(to_dict(config)))
    return [
        f"{path}: {_said(before, path)} -> {_said(after, path)}"
        for path in {**before, **after}
        if path not in ("name", "dump_folder", "overwrite") and _said(before, path) != _said(after, path)
    ]


def leaves(value: Any, *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every leaf of a config as `to_dict` has it; a list is one leaf."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, prefix=f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, value


def _said(values: Mapping[str, Any], path: str) -> str:
    return json.dumps(values[path]) if path in values else "absent"
