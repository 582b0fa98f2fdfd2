"""The tools of a verifiers task as the model is told of them, before any of its tool servers runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl.data.packages import import_for_tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """A tool by name and schema; it is called where verifiers runs it."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    async def call(self, arguments: Mapping[str, Any]) -> str:
        raise AssertionError("verifiers calls its tools itself")


class Recorder:
    """Takes what a toolset registers, in place of the MCP server that it runs in."""

    def __init__(self) -> None:
        self.tools: list[Any] = []

    def add_tool(self, fn: Any, name: str | None = None, description: str | None = None) -> None:
        tool = import_for_tasks("mcp.server.mcpserver.tools.base", needed_by="tools of verifiers").Tool
        self.tools.append(tool.from_function(fn, name=name, description=description))


def declarations(task: Any, taskset: Any) -> list[Declaration]:
    """The tools of a task, by the names that its harness gives them; shared servers come first, as there.

    Raises:
        ValueError: what tools there are is known to a running server alone.
    """
    declared: list[Declaration] = []
    for toolset in (*taskset.toolsets(taskset.config), *task.toolsets(task.config)):
        name = toolset.server_name
        if toolset.config.url:
            raise ValueError(
                f"its tool server {name!r} is at {toolset.config.url}: only asked does it say what it has"
            )
        try:
            cls: Any = type(toolset)
            tools = _recorded(cls, toolset.config.model_dump_json())
        except AttributeError as error:
            raise ValueError(f"its tool server {name!r} registers more than functions: {error}") from error
        prefix = f"{name}_" if name else ""
        declared += [
            Declaration(
                name=f"{prefix}{tool.name}", description=tool.description or "", parameters=tool.parameters
            )
            for tool in tools
        ]
    return declared


@functools.lru_cache(maxsize=256)
def _recorded(cls: Any, config: str) -> tuple[Any, ...]:
    toolset = cls(cls._config_cls().model_validate_json(config))
    recorder = Recorder()
    toolset.register(recorder)
    return tuple(recorder.tools)
