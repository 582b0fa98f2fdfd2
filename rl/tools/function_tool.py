"""Tools from typed Python functions."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from rl.tools.tool import ToolError, ToolTimeoutError
from rl.utils.threads import run_aside


class FunctionTool:
    """Tool that calls a Python function: `async def` in the event loop, `def` in a thread of its own.

    Name, description and JSON schema come from the signature and the docstring, whose `Args:` section (Google
    style) describes every parameter, by `transformers.utils.get_json_schema`. A parameter with a default is
    optional. The model is shown a returned string as it is, anything else as JSON, and an exception as an error.

    A thread cannot be stopped from outside. A plain function that exceeds its time limit is abandoned: the
    model is told so, and the thread goes on until the function returns or the process ends. Run code that may
    never end in `PythonSandbox`.

    Args:
        time_limit_s: longest time of one call.

    Raises:
        ValueError: a parameter has no description, no annotation, or one that JSON cannot express.
    """

    def __init__(self, function: Callable[..., Any], *, time_limit_s: float = 10.0, name: str = "") -> None:
        if not time_limit_s > 0:
            raise ValueError(f"time_limit_s={time_limit_s} is not above 0")
        self.function = function
        self.time_limit_s = time_limit_s
        self.name = name or function.__name__
        try:
            schema = get_json_schema(function)["function"]
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ValueError(f"the function {self.name}: {error}") from error
        self.description: str = schema["description"]
        self.parameters: Mapping[str, Any] = schema["parameters"] | {"additionalProperties": False}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        passed = {name: self._whole(name, value) for name, value in arguments.items()}
        timer = asyncio.timeout(self.time_limit_s)
        try:
            async with timer:
                if inspect.iscoroutinefunction(self.function):
                    result = await self.function(**passed)
                else:
                    result = await run_aside(lambda: self._call_plain(passed), name=f"tool-{self.name}")
        except ToolError:
            raise
        except Exception as error:
            if timer.expired():
                raise ToolTimeoutError(
                    f"Error: {self.name} took longer than {self.time_limit_s:g} s and was stopped"
                ) from None
            raise ToolError(f"Error: {type(error).__name__}: {error}") from error
        return result if isinstance(result, str) else _as_json(result)

    def _call_plain(self, arguments: Mapping[str, Any]) -> Any:
        try:
            return self.function(**arguments)
        except BaseException as error:
            # A future cannot hold StopIteration, and SystemExit would end the event loop.
            raise ToolError(f"Error: {type(error).__name__}: {error}") from error

    def _whole(self, name: str, value: Any) -> Any:
        """Convert 2.0, which JSON schema accepts as an integer, to the int that a function expects."""
        if isinstance(value, float) and self.parameters["properties"][name].get("type") == "integer":
            return int(value)
        return value


def _as_json(result: Any) -> str:
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
