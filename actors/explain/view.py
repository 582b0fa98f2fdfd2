"""The resolved config, and what differs from its registry function."""

from __future__ import annotations

from typing import Any

from actors.explain.explanation import Change, ConfigView
from rl.config.changes import leaves
from rl.config.registry import ResolvedRun, resolve
from rl.config.serialize import to_dict


def config_view(run: ResolvedRun) -> ConfigView:
    values = dict(leaves(to_dict(run.config)))
    registry = dict(leaves(to_dict(resolve(run.module, run.function).config)))
    return ConfigView(
        module=run.module,
        function=run.function,
        changes=tuple(
            Change(
                path=path,
                value=values.get(path),
                registry=registry.get(path),
                source=_source(run, path),
            )
            for path in {**registry, **values}
            if not _is_same(values, registry, path)
        ),
        values=values,
    )


def _is_same(values: dict[str, Any], registry: dict[str, Any], path: str) -> bool:
    """As JSON has them, where 1 is no True."""
    absent = object()
    value, other = values.get(path, absent), registry.get(path, absent)
    return type(value) is type(other) and value == other


def _source(run: ResolvedRun, path: str) -> str:
    # An option may turn off a component, and a list of components is one leaf.
    for option in run.options:
        if f"{path}.".startswith(f"{option}.") or option.startswith(f"{path}."):
            return "command line"
    return "code" if run.file is None else str(run.file)
