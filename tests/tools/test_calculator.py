import asyncio

import pytest

from rl.tools.calculator import MAX_CHARS, Calculator
from rl.tools.tool import ToolError


def answer(expression):
    return asyncio.run(Calculator().call({"expression": expression}))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("-7 // 2", "-4"),
        ("7 / 2", "3.5"),
        ("2 ** -1", "0.5"),
        ("-2 ** 2", "-4"),
        ("2 ** 0.5", "1.4142135623730951"),
        (" 1_000 * 3 ", "3000"),
        ("2 ** 4095 // 2 ** 4094", "2"),
        ("2 ** -99999999999", "0"),
        ("1 ** 99999999999999", "1"),
    ],
)
def test_value_is_pythons(expression, value):
    assert answer(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("9**9**9", "too large"),
        ("9" * 400 + "**9" * 30, "too large"),
        ("(9**9**3)" + "*(9**9**3)" * 40, "too large"),
        ("2 ** 4096", "too large"),
        ("2 ** 4095 * 2", "too large"),
        ("1e308 * 10", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("__import__('os').getpid()", "not allowed"),
        ("x + 1", "'x' is not allowed"),
        ("True + 1", "'True' is not allowed"),
        ("", "not an arithmetic expression"),
        ("1\0", "not an arithmetic expression"),
        ("(" * 240 + "1" + ")" * 240, "Error: "),
        ("1+" * MAX_CHARS + "1", f"at most {MAX_CHARS}"),
    ],
)
def test_error_says_what_is_wrong(expression, message):
    with pytest.raises(ToolError, match=r"^Error: ") as error:
        answer(expression)
    assert message in str(error.value)
