"""A tool from a typed Python function."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
import threading
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from rl.tools.slots import Slots
from rl.tools.tool import ToolError, ToolTimeoutError

MAX_RUNNING = 32
"""Calls of one function that run at the same time, those counted that were given up and never ended."""
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_VALID = "str, int, float, bool, None, list[...], dict[str, ...], Literal[...] and unions of them"


class FunctionTool:
    """Calls a function by keyword. A plain one runs in a thread of its own, a coroutine function in the loop.

    Its name, description and JSON schema come from the signature and the docstring, whose `Args:` (Google's
    style) describe the parameters. A parameter with a default may be left out. What it returns is told as
    text: a string as it is, anything else as JSON. What it raises is told too, and counted as an error.

    A thread cannot be ended from outside. A plain function that is over its time limit is given up: the
    model is told so, and the thread goes on until the function returns, or the process ends. Code that may
    run for ever belongs into `PythonSandbox`.

    Args:
        time_limit_s: longest time of one call, the wait for a place among `MAX_RUNNING` included.

    Raises:
        ValueError: a parameter has no annotation, or one that JSON cannot say; names the parameter.
    """

    def __init__(self, function: Callable[..., Any], *, time_limit_s: float = 10.0, name: str = "") -> None:
        if not time_limit_s > 0:
            raise ValueError(f"time_limit_s={time_limit_s} is not above 0")
        self.function = function
        self.time_limit_s = time_limit_s
        self.name = name or function.__name__
        self.description, described = _read_docstring(inspect.getdoc(function) or "")
        if not self.description:
            raise ValueError(f"the function {self.name} has no docstring; a model reads what it is for there")
        self.parameters: Mapping[str, Any] = _schema_of(function, described)
        self._slots = Slots(MAX_RUNNING)

    async def call(self, arguments: Mapping[str, Any]) -> str:
        slots = self._slots.here()
        passed = {name: self._whole(name, value) for name, value in arguments.items()}
        timer = asyncio.timeout(self.time_limit_s)
        try:
            async with timer:
                if inspect.iscoroutinefunction(self.function):
                    async with slots:
                        result = await self.function(**passed)
                else:
                    await slots.acquire()
                    result = await _in_thread(self.function, passed, at_end=slots.release)
        except Exception as error:
            if timer.expired():
                raise ToolTimeoutError(
                    f"Error: {self.name} took longer than {self.time_limit_s:g} s and was stopped"
                ) from None
            raise ToolError(f"Error: {type(error).__name__}: {error}") from error
        return result if isinstance(result, str) else _as_json(result)

    def _whole(self, name: str, value: Any) -> Any:
        """JSON schema takes 2.0 for an integer; a function expects an int."""
        if isinstance(value, float) and self.parameters["properties"][name].get("type") == "integer":
            return int(value)
        return value


async def _in_thread(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, at_end: Callable[[], None]
) -> Any:
    """Of a thread that keeps neither a pool's place nor the process; `at_end` is called when it ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        at_end()
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = function(**arguments)
        except BaseException as caught:  # noqa: BLE001  (handed to whoever waits)
            # Those that a future cannot hold, or that would end the loop, by name.
            plain = isinstance(caught, Exception) and not isinstance(caught, StopIteration)
            error = caught if plain else RuntimeError(f"{type(caught).__name__}: {caught}")  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    try:
        threading.Thread(target=work, name=f"tool-{function.__name__}", daemon=True).start()
    except RuntimeError:
        at_end()
        raise
    return await future


def _as_json(result: Any) -> str:
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def _schema_of(function: Callable[..., Any], described: Mapping[str, str]) -> dict[str, Any]:
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        where = f"parameter {name!r} of {function.__name__}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{where} is {parameter.kind.description}; a model names every argument")
        if name not in hints:
            raise ValueError(f"{where} has no annotation; valid are {_VALID}")
        properties[name] = _schema(hints[name], where)
        if name in described:
            properties[name]["description"] = described[name]
        if parameter.default is parameter.empty:
            required.append(name)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin is list or hint is list:
        return {"type": "array", **({"items": _schema(arguments[0], where)} if arguments else {})}
    if hint is dict or (origin is dict and arguments[0] is str):
        inner = {"additionalProperties": _schema(arguments[1], where)} if arguments else {}
        return {"type": "object", **inner}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(argument, where) for argument in arguments]}
    raise ValueError(f"{where} is annotated with {hint!r}; valid are {_VALID}")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What stands before the first section, and the descriptions of `Args:` by name."""
    head, *sections = re.split(
        r"^(Args|Returns|Raises|Yields|Example|Examples):\s*$", text, flags=re.MULTILINE
    )
    described: dict[str, str] = {}
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title == "Args":
            name = ""
            for line in inspect.cleandoc(body).splitlines():
                if match := re.match(r"(\w+)(?: \([^)]*\))?: *(.*)", line):
                    name = match[1]
                    described[name] = match[2]
                elif name and line.strip():
                    described[name] = f"{described[name]} {line.strip()}".strip()
    return re.sub(r"(?<!\n)\n(?!\n)", " ", head).strip(), described
