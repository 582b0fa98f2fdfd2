"""What is different in a run's config from the file that it was started with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl.config.serialize import to_dict


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
    """Each option of a config's JSON values with its dotted path."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, prefix=f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, value


def _said(values: Mapping[str, Any], path: str) -> str:
    return json.dumps(values[path]) if path in values else "absent"
