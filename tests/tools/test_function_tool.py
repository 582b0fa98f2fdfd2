import asyncio
import threading
from typing import Literal

import pytest

from rl.tools.function_tool import FunctionTool
from rl.tools.tool import ToolError, ToolTimeoutError, check_tools


def convert(
    value: float,
    to: Literal["m", "ft"],
    digits: int = 2,
    names: list[str] | None = None,
    *,
    exact: bool = False,
) -> str:
    """Convert a length
    between units.

    Of any size.

    Args:
        value: the length,
            in the other unit
        to: the unit wanted
        digits: after the point
        names: unused
        exact: unused
    """
    return f"{value} {to} {digits!r} {names} {exact}"


def call(function, time_limit_s=10.0, **arguments):
    return asyncio.run(FunctionTool(function, time_limit_s=time_limit_s).call(arguments))


def test_schema_is_that_of_signature_and_docstring():
    tool = FunctionTool(convert)
    assert (tool.name, tool.description) == ("convert", "Convert a length\nbetween units.\n\nOf any size.")
    assert tool.parameters["properties"]["value"] == {
        "type": "number", "description": "the length, in the other unit",
    }  # fmt: skip
    assert tool.parameters["properties"]["to"]["enum"] == ["m", "ft"]
    assert (tool.parameters["required"], tool.parameters["additionalProperties"]) == (["value", "to"], False)
    check_tools([tool])
    # Whole numbers arrive as integers.
    assert call(convert, value=2.5, to="m", digits=3.0) == "2.5 m 3 None False"
    with pytest.raises(ValueError, match="time_limit_s=0 is not above 0"):
        FunctionTool(convert, time_limit_s=0)


def test_function_without_a_schema_is_refused_by_name():
    def no_annotation(x):
        """Says.

        Args:
            x: a thing
        """

    def undescribed(x: int) -> str:
        """Says."""
        return str(x)

    for function in (no_annotation, undescribed):
        with pytest.raises(ValueError, match=f"the function {function.__name__}: "):
            FunctionTool(function)


def test_results_other_than_text_are_json():
    def table() -> dict:
        """A table."""
        return {"é": [1, None]}

    def thing() -> object:
        """A thing."""
        return {1}

    assert call(table) == '{"é": [1, null]}'
    assert call(thing) == "{1}"


@pytest.mark.parametrize("error", [KeyError("k"), TimeoutError("its own"), StopIteration("s"), SystemExit(3)])
def test_error_of_a_function_is_a_tool_error(error):
    def fail() -> str:
        """Fails."""
        raise error

    with pytest.raises(ToolError, match=f"^Error: .*{type(error).__name__}: {error}") as caught:
        call(fail)
    assert not isinstance(caught.value, ToolTimeoutError)


def test_function_that_blocks_fails_at_its_time_limit_without_blocking_the_loop():
    release = threading.Event()

    def block() -> str:
        """Blocks."""
        release.wait()
        return "late"

    async def both():
        slow = FunctionTool(block, time_limit_s=0.2)
        quick = FunctionTool(convert)
        blocked = asyncio.create_task(slow.call({}))
        assert await quick.call({"value": 1, "to": "m"}) == "1 m 2 None False"
        with pytest.raises(ToolTimeoutError, match=r"block took longer than 0.2 s"):
            await blocked

    asyncio.run(both())
    release.set()


def named(name, parameters=None):
    tool = FunctionTool(convert, name=name)
    tool.parameters = tool.parameters if parameters is None else parameters
    return tool


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([named("two words")], "tool name 'two words': must be 1 to 64 letters"),
        ([named("a"), named("b"), named("a")], r"tool name 'a': .* differ from the others"),
        ([named("a", {"type": "objekt"})], "parameters of the tool 'a' are not a JSON schema"),
        ([named("a", {"type": "string"})], "must have the type 'object'"),
    ],
)
def test_invalid_tools_are_refused(tools, message):
    with pytest.raises(ValueError, match=message):
        check_tools(tools)
