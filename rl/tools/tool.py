"""What a model may call: the protocol of a tool, its errors, and what every tool is checked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names that every chat format can carry."""


class Tool(Protocol):
    """One function that a model may call, shared by all episodes; calls of it overlap."""

    @property
    def name(self) -> str:
        """By which the model calls it: letters, digits, `_` and `-`, at most 64."""
        ...

    @property
    def description(self) -> str:
        """What the model is told of it."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema (draft 2020-12) of the arguments: of type object."""
        ...

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The text that the model is told. `arguments` were checked against `parameters`.

        It holds its own time limit, and gives back what it took when it is cancelled.

        Raises:
            ToolError: the model is told so, and the call is counted as an error. Anything else is a defect of
                the tool, and fails the rollout.
        """
        ...


class ToolError(Exception):
    """A call that did not succeed; the message is what the model is told."""


class ToolTimeoutError(ToolError):
    """A call that was stopped at its time limit."""


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises ValueError for a name or a schema that no model could call, or that two tools share."""
    names = [tool.name for tool in tools]
    for tool in tools:
        if not NAME.fullmatch(tool.name):
            raise ValueError(
                f"the tool's name {tool.name!r} is not of letters, digits, '_' and '-', 1 to 64 of them"
            )
        if names.count(tool.name) > 1:
            raise ValueError(f"two tools are named {tool.name!r}; each needs a name of its own among {names}")
        schema = dict(tool.parameters)
        try:
            Draft202012Validator.check_schema(schema)
        except SchemaError as error:
            raise ValueError(
                f"parameters of the tool {tool.name!r} are no JSON schema: {error.message}"
            ) from None
        if schema.get("type") != "object":
            raise ValueError(
                f"parameters of the tool {tool.name!r} have the type {schema.get('type')!r}, and must have "
                "'object': the arguments by name"
            )
