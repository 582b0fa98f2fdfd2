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
        to (str): the unit wanted

    Returns:
        digits: not a parameter here
    """
    return f"{value} {to} {digits!r} {names} {exact}"


def call(function, time_limit_s=10.0, **arguments):
    return asyncio.run(FunctionTool(function, time_limit_s=time_limit_s).call(arguments))


def test_schema_is_that_of_signature_and_docstring():
    tool = FunctionTool(convert)
    assert (tool.name, tool.description) == ("convert", "Convert a length between units.\n\nOf any size.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "value": {"type": "number", "description": "the length, in the other unit"},
            "to": {"enum": ["m", "ft"], "description": "the unit wanted"},
            "digits": {"type": "integer"},
            "names": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
            "exact": {"type": "boolean"},
        },
        "required": ["value", "to"],
        "additionalProperties": False,
    }
    check_tools([tool])


def test_dicts_and_bare_containers_have_a_schema():
    def store(table: dict[str, int], rows: list, more: dict) -> None:
        """Store."""

    assert FunctionTool(store).parameters["properties"] == {
        "table": {"type": "object", "additionalProperties": {"type": "integer"}},
        "rows": {"type": "array"},
        "more": {"type": "object"},
    }


def test_arguments_arrive_by_name_with_defaults_and_whole_numbers_as_integers():
    assert call(convert, value=2.5, to="m", digits=3.0) == "2.5 m 3 None False"


def no_annotation(x):
    """Says."""
    return x


def odd_annotation(x: set[int]) -> str:
    """Says."""
    return str(x)


def number_keys(x: dict[int, str]) -> str:
    """Says."""
    return str(x)


def many(*values: int) -> str:
    """Says."""
    return str(values)


def undescribed(x: int) -> str:
    return str(x)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (no_annotation, "parameter 'x' of no_annotation has no annotation"),
        (odd_annotation, "parameter 'x' of odd_annotation is annotated with set"),
        (number_keys, "parameter 'x' of number_keys is annotated with dict"),
        (many, "parameter 'values' of many is variadic"),
        (undescribed, "undescribed has no docstring"),
    ],
)
def test_function_that_no_model_can_call_is_refused_by_name(function, said):
    with pytest.raises(ValueError, match=said):
        FunctionTool(function)


def test_time_limit_of_nothing_is_refused():
    with pytest.raises(ValueError, match="time_limit_s=0 is not above 0"):
        FunctionTool(convert, time_limit_s=0)


def test_results_that_are_no_text_are_told_as_json():
    def table(x: int) -> dict:
        """A table."""
        return {"é": [x, None]}

    def thing() -> object:
        """A thing."""
        return {1}

    assert call(table, x=1) == '{"é": [1, null]}'
    assert call(thing) == "{1}"


def test_coroutine_functions_run_in_the_loop():
    async def where() -> str:
        """Says its thread."""
        return threading.current_thread().name

    assert call(where) == threading.current_thread().name


@pytest.mark.parametrize("error", [KeyError("k"), TimeoutError("its own"), StopIteration("s"), SystemExit(3)])
def test_what_a_function_raises_is_told(error):
    def fail() -> str:
        """Fails."""
        raise error

    with pytest.raises(ToolError, match=f"^Error: .*{type(error).__name__}: {error}") as told:
        call(fail)
    assert not isinstance(told.value, ToolTimeoutError)


def test_function_that_blocks_is_given_up_at_its_time_limit_and_the_loop_goes_on():
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


def test_coroutine_that_waits_for_ever_is_cancelled_at_its_time_limit():
    ended = []

    async def wait() -> str:
        """Waits."""
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return "never"

    with pytest.raises(ToolTimeoutError):
        call(wait, time_limit_s=0.05)
    assert ended == [True]


def named(name, parameters=None):
    tool = FunctionTool(convert, name=name)
    tool.parameters = tool.parameters if parameters is None else parameters
    return tool


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([named("two words")], "the tool's name 'two words'"),
        ([named("x" * 65)], "1 to 64 of them"),
        ([named("a"), named("b"), named("a")], "two tools are named 'a'"),
        ([named("a", {"type": "objekt"})], "parameters of the tool 'a' are no JSON schema"),
        ([named("a", {"type": "string"})], "have the type 'string', and must have 'object'"),
        ([named("a", {})], "have the type None"),
    ],
)
def test_tool_that_cannot_be_announced_is_refused(tools, said):
    with pytest.raises(ValueError, match=said):
        check_tools(tools)
