"""Tool calls in a model's text, in the format of Hermes and Qwen3:

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "6 * 7"}}
    </tool_call>

and the system text that announces tools, as Qwen3's chat template writes it. What a model gets wrong is no
exception but a `BadCall`, whose text it is told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from rl.rollouts.replies import THINK_CLOSE, THINK_OPEN
from rl.tools.tool import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORM = f'{OPEN}{{"name": <function-name>, "arguments": <args-json-object>}}{CLOSE}'
MAX_QUOTED = 200
"""Characters of a message that an error of a schema may quote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadCall:
    """A call that cannot be made."""

    error: str
    """What the model is told."""


def parse_calls(text: str) -> tuple[ToolCall | BadCall, ...]:
    """The calls of a reply, in order. What stands in `<think>` is thought of, and not called."""
    text = text.rpartition(THINK_CLOSE)[2]
    text = text.partition(THINK_OPEN)[0]
    calls: list[ToolCall | BadCall] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        call, position = _parse_one(text, start + len(OPEN))
        calls.append(call)
    return tuple(calls)


def check_call(call: ToolCall, tools: Sequence[Tool]) -> Tool | BadCall:
    """The tool that is called, if there is one and the arguments fit its schema."""
    by_name = {tool.name: tool for tool in tools}
    tool = by_name.get(call.name)
    if tool is None:
        return BadCall(error=f"Error: there is no tool {call.name!r}; the tools are {', '.join(by_name)}")
    try:
        problem = best_match(Draft202012Validator(dict(tool.parameters)).iter_errors(dict(call.arguments)))
    except RecursionError:
        return BadCall(error=f"Error: arguments of {call.name} are nested too deeply")
    if problem is None:
        return tool
    where = "".join(f"[{step!r}]" for step in problem.absolute_path)
    message = problem.message
    if len(message) > MAX_QUOTED:
        message = f"{message[: MAX_QUOTED // 2]} ... {message[-MAX_QUOTED // 2 :]}"
    return BadCall(error=f"Error: arguments{where} of {call.name}: {message}")


def announce(tools: Sequence[Tool], system: str = "") -> str:
    """The system message: `system`, then the tools and how they are called, word for word as Qwen3's chat
    template writes them from its argument `tools`."""
    described = "".join(f"\n{json.dumps(describe(tool), ensure_ascii=False)}" for tool in tools)
    return (
        (f"{system}\n\n" if system else "")
        + "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        + "You are provided with function signatures within <tools></tools> XML tags:\n"
        + f"<tools>{described}\n</tools>\n\n"
        + "For each function call, return a json object with function name and arguments within "
        + f"{OPEN}{CLOSE} XML tags:\n"
        + f'{OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CLOSE}'
    )


def describe(tool: Tool) -> dict[str, Any]:
    """As chat templates and OpenAI-compatible servers take it."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def render_call(call: ToolCall) -> str:
    """As a model writes it, for demonstrations: what `parse_calls` reads, and Qwen3's template writes."""
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return f'{OPEN}\n{{"name": "{call.name}", "arguments": {arguments}}}\n{CLOSE}'


def _parse_one(text: str, start: int) -> tuple[ToolCall | BadCall, int]:
    """The call whose JSON begins at `start`, and where to look for the next.

    The JSON ends where its object ends, so the end tag may stand in a string of it.
    """
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = _DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()
        problem = ""
    except UnicodeEncodeError:
        end, problem = start, "has half of a surrogate pair, which is no text"
    except RecursionError:
        end, problem = start, "is nested too deeply"
    except json.JSONDecodeError as error:
        end, problem = start, f"is not valid JSON: {error.msg}, at character {error.pos - start} of it"
    except ValueError as error:
        end, problem = start, f"is not valid JSON: {error}"
    close = text.find(CLOSE, end)
    after = len(text) if close < 0 else close + len(CLOSE)
    if not problem and close < 0:
        problem = f"has no {CLOSE}"
    if not problem and text[end:close].strip():
        problem = f"has more than one JSON object before {CLOSE}"
    if problem:
        return _bad(problem), after
    return _as_call(value), after


def _as_call(value: Any) -> ToolCall | BadCall:
    if not isinstance(value, dict):
        return _bad(f"is a JSON {_TYPE_NAMES.get(type(value), 'value')}, not an object")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str):
        return _bad('has no "name" that is a string')
    if not isinstance(arguments, dict):
        return _bad('has no "arguments" that is an object')
    return ToolCall(name=name, arguments=arguments)


def _bad(problem: str) -> BadCall:
    return BadCall(error=f"Error: the tool call {problem}. The form is {FORM}")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_TYPE_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean"}
