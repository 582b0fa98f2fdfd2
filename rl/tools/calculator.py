"""The tool `calculator`: arithmetic, at no risk of running long."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from rl.tools.tool import ToolError

MAX_CHARS = 500
MAX_BITS = 4096
"""Of an integer: about 1,233 decimal digits."""
Number = int | float

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_VALID = "numbers, + - * / // % ** and parentheses"


class Calculator:
    """Evaluates one expression of numbers, `+ - * / // % **` and parentheses, with Python's meaning.

    An integer beyond `MAX_BITS` is refused before it is computed, so no expression takes long.
    """

    def __init__(self) -> None:
        self.name = "calculator"
        self.description = f"Evaluate an arithmetic expression of {_VALID}."
        self.parameters: Mapping[str, Any] = {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "The expression, such as (3 + 4) * 2."}
            },
            "required": ["expression"],
            "additionalProperties": False,
        }

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return format_number(evaluate(arguments["expression"]))


def evaluate(expression: str) -> Number:
    """The expression's value.

    Raises:
        ToolError: it is no such expression, or has no value within the limits.
    """
    if len(expression) > MAX_CHARS:
        raise ToolError(f"Error: the expression has {len(expression)} characters, at most {MAX_CHARS}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ToolError("Error: division by zero") from None
    except (OverflowError, RecursionError, MemoryError):
        raise ToolError("Error: the expression is too large") from None
    except (SyntaxError, ValueError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ToolError(f"Error: not an arithmetic expression ({reason}); valid are {_VALID}") from None
    return value


def format_number(value: Number) -> str:
    """Without `.0` where a float is a whole number that it holds exactly."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> Number:
    # bool is an int, and no number here.
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _within_limits(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _within_limits(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
        raise ToolError("Error: ^ is not an operator here; a power is written **")
    if isinstance(node, ast.Tuple):
        raise ToolError("Error: a comma is not part of a number; write 1000, not 1,000")
    raise ToolError(f"Error: {ast.unparse(node)[:80]!r} is not allowed; valid are {_VALID}")


def _check_power(base: Number, exponent: Number) -> None:
    """The one operator whose result may be so large that computing it takes for ever."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0 and abs(base) > 1:
        least_bits = (base.bit_length() - 1) * exponent
        if least_bits > MAX_BITS:
            raise OverflowError


def _within_limits(value: Any) -> Number:
    if isinstance(value, complex):
        raise ToolError("Error: the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError
    return value
