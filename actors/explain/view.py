"""The resolved config, and what differs from its registry function."""

from __future__ import annotations

from actors.explain.explanation import Change, ConfigView
from rl.config.changes import differences, leaves
from rl.config.registry import ResolvedRun, resolve
from rl.config.serialize import to_dict


def config_view(run: ResolvedRun) -> ConfigView:
    values = to_dict(run.config)
    registry = to_dict(resolve(run.module, run.function).config)
    return ConfigView(
        module=run.module,
        function=run.function,
        changes=tuple(
            Change(path=d.path, value=d.value, registry=d.registry, source=_source(run, d.path))
            for d in differences(values, registry)
        ),
        values=dict(leaves(values)),
    )


def _source(run: ResolvedRun, path: str) -> str:
    # An option may turn off a component, and a list of components is one leaf.
    for option in run.options:
        if f"{path}.".startswith(f"{option}.") or option.startswith(f"{path}."):
            return "command line"
    return "code" if run.file is None else str(run.file)
