"""Tools that a model may call: the protocol, tools from Python functions, and the calls in a reply.

Calls have the format of Hermes and Qwen3:

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "6 * 7"}}
    </tool_call>

A mistake of the model is not an exception but a `BadCall`, whose text the model is shown.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

from rl.rollouts.replies import CALL_CLOSE, CALL_OPEN, MAX_CALLS, ReplyPart, split_reply
from rl.types import ToolCall
from rl.utils.printing import truncate
from rl.utils.threads import run_in_thread

FORM = f'{CALL_OPEN}{{"name": <function-name>, "arguments": <args-json-object>}}{CALL_CLOSE}'
MAX_QUOTED = 200
"""Longest part of a schema error that the model is shown, in characters."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names that every chat format can carry."""


class ToolDescription(Protocol):
    """A tool as a model reads of it."""

    @property
    def name(self) -> str:
        """Name in calls: 1 to 64 letters, digits, `_` and `-`."""
        ...

    @property
    def description(self) -> str:
        """Description that the model reads."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema (draft 2020-12) of the arguments, of type object."""
        ...


class Tool(ToolDescription, Protocol):
    """A function that a model may call. All episodes share one object, and its calls overlap."""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the text that the model is shown. `arguments` already fit `parameters`.

        A tool keeps its own time limit, and releases its resources when the call is cancelled. If a
        call fails, it raises ToolError; any other exception is a bug in the tool and fails the
        rollout.
        """
        ...


class ToolError(Exception):
    """A failed call; the model is shown the message."""


class ToolTimeoutError(ToolError):
    """A call that was stopped at its time limit."""


class FunctionTool:
    """Tool that calls a Python function.

    `async def` runs in the event loop, `def` in a thread of its own.

    Name, description and JSON schema come from the signature and the docstring, whose `Args:`
    section (Google style) describes every parameter. The model is shown a returned string as it is,
    anything else as JSON, and an exception as an error.

    Example:
        def add(a: int, b: int) -> int:
            '''Add two numbers.

            Args:
                a: the first one.
                b: the second one.
            '''
            return a + b

        tool = FunctionTool(add, time_limit_s=1.0)

    A thread cannot be stopped: a plain function that exceeds its time limit goes on until it
    returns or the process ends. Run code that may never end in `PythonSandbox`.

    Raises:
        ValueError: a parameter has no description, no annotation, or one that JSON cannot express.
    """

    def __init__(
        self, function: Callable[..., Any], *, time_limit_s: float = 10.0, name: str = ""
    ) -> None:
        if not time_limit_s > 0:
            raise ValueError(f"time_limit_s={time_limit_s} is not above 0")
        self.function = function
        self.time_limit_s = time_limit_s
        # transformers is imported here, for the processes that need only the other tools.
        from transformers.utils import get_json_schema
        from transformers.utils.chat_template_utils import (
            DocstringParsingException,
            TypeHintParsingException,
        )

        self.name = name or function.__name__
        try:
            schema = get_json_schema(function)["function"]
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ValueError(f"the function {self.name}: {error}") from error
        self.description: str = schema["description"]
        self.parameters: Mapping[str, Any] = schema["parameters"] | {"additionalProperties": False}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        passed = {name: self._to_whole(name, value) for name, value in arguments.items()}
        # The tool's own limit: `expired` tells it from a TimeoutError of the function.
        timer = asyncio.timeout(self.time_limit_s)
        try:
            async with timer:
                if inspect.iscoroutinefunction(self.function):
                    result = await self.function(**passed)
                else:
                    result = await run_in_thread(
                        lambda: self._call_plain(passed), name=f"tool-{self.name}"
                    )
        except ToolError:
            raise
        except Exception as error:
            if timer.expired():
                raise ToolTimeoutError(
                    f"Error: {self.name} took longer than {self.time_limit_s:g} s and was stopped"
                ) from None
            raise ToolError(f"Error: {type(error).__name__}: {error}") from error
        if isinstance(result, str):
            return result
        try:
            return json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError):
            return str(result)

    def _call_plain(self, arguments: Mapping[str, Any]) -> Any:
        try:
            return self.function(**arguments)
        except BaseException as error:
            # A future cannot hold StopIteration, and SystemExit would end the event loop.
            raise ToolError(f"Error: {type(error).__name__}: {error}") from error

    def _to_whole(self, name: str, value: Any) -> Any:
        """Convert 2.0, which JSON schema accepts as an integer, to the int of a function."""
        if (
            isinstance(value, float)
            and self.parameters["properties"][name].get("type") == "integer"
        ):
            return int(value)
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class BadCall:
    """A call that cannot be made, with the text that the model is shown."""

    error: str


def check_tools(tools: Sequence[ToolDescription]) -> None:
    """Raise ValueError if a name or a schema is invalid, or if two tools share a name."""
    names = [tool.name for tool in tools]
    for tool in tools:
        if not NAME.fullmatch(tool.name) or names.count(tool.name) > 1:
            raise ValueError(
                f"tool name {tool.name!r}: must be 1 to 64 letters, digits, '_' and '-', and "
                f"differ from the others of {names}"
            )
        try:
            Draft202012Validator.check_schema(dict(tool.parameters))
        except SchemaError as error:
            message = error.message
            raise ValueError(
                f"parameters of the tool {tool.name!r} are not a JSON schema: {message}"
            ) from None
        if tool.parameters.get("type") != "object":
            raise ValueError(f"parameters of the tool {tool.name!r} must have the type 'object'")


def parse_calls(text: str) -> tuple[ToolCall | BadCall, ...]:
    """Return the calls of a reply in order, leaving out everything inside a thought.

    Calls beyond `MAX_CALLS` are not read; one `BadCall` at the end says so.
    """
    parts = split_reply(text)
    calls = [_read(part) for part in parts if part.kind == "call"]
    if any(part.kind == "text" and CALL_OPEN in part.text for part in parts):
        calls.append(
            BadCall(error=f"Error: only the first {MAX_CALLS} tool calls of a reply are read")
        )
    return tuple(calls)


def find_tool(call: ToolCall, tools: Sequence[Tool]) -> Tool:
    """Return the tool of a call.

    Raises ToolError if there is none, or if the arguments do not fit its schema.
    """
    by_name = {tool.name: tool for tool in tools}
    tool = by_name.get(call.name)
    if tool is None:
        raise ToolError(
            f"Error: there is no tool {call.name!r}; the tools are {', '.join(by_name)}"
        )
    try:
        problem = best_match(
            Draft202012Validator(dict(tool.parameters)).iter_errors(dict(call.arguments))
        )
    except RecursionError:
        raise ToolError(f"Error: arguments of {call.name} are nested too deeply") from None
    if problem is not None:
        where = "".join(f"[{step!r}]" for step in problem.absolute_path)
        message = truncate(problem.message, most=MAX_QUOTED)
        raise ToolError(f"Error: arguments{where} of {call.name}: {message}")
    return tool


def announce(tools: Sequence[ToolDescription], system: str = "") -> str:
    """Return a system message with `system`, the tools, and how to call them.

    The wording is exactly Qwen3's.
    """
    # Word for word, because models were trained on this text.
    described = ""
    for tool in tools:
        described += "\n" + json.dumps(describe(tool), ensure_ascii=False)
    return (
        (f"{system}\n\n" if system else "")
        + "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        + "You are provided with function signatures within <tools></tools> XML tags:\n"
        + f"<tools>{described}\n</tools>\n\n"
        + "For each function call, return a json object with function name and arguments within "
        + f"{CALL_OPEN}{CALL_CLOSE} XML tags:\n"
        + f'{CALL_OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CALL_CLOSE}'
    )


def describe(tool: ToolDescription) -> dict[str, Any]:
    """Return the tool as chat templates and OpenAI-compatible servers expect it."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}


def render_call(call: ToolCall) -> str:
    """Return the text of a call for a demonstration, as Qwen3's template writes it."""
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return f'{CALL_OPEN}\n{{"name": "{call.name}", "arguments": {arguments}}}\n{CALL_CLOSE}'


def _read(part: ReplyPart) -> ToolCall | BadCall:
    """Return the call of a part of a reply."""
    name = part.value.get("name") if isinstance(part.value, dict) else None
    arguments = part.value.get("arguments") if isinstance(part.value, dict) else None
    if not part.problem and isinstance(name, str) and isinstance(arguments, dict):
        return ToolCall(name=name, arguments=arguments)
    problem = part.problem or 'is not an object with a string "name" and an object "arguments"'
    return BadCall(error=f"Error: the tool call {problem}. The form is {FORM}")
