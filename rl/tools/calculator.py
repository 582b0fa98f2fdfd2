"""The tool `calculator`: arithmetic that cannot run for long."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from rl.tools.tool import ToolError

MAX_CHARS = 500
MAX_BITS = 4096
"""Largest size of an integer: about 1,233 decimal digits."""
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
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_VALID = "numbers, + - * / // % ** and parentheses"


class Calculator:
    """Tool that evaluates one arithmetic expression as Python does.

    Valid are numbers, `+ - * / // % **` and parentheses.

    Integers beyond `MAX_BITS` are refused before they are computed, so no expression takes long.
    """

    def __init__(self) -> None:
        self.name = "calculator"
        self.description = f"Evaluate an arithmetic expression of {_VALID}."
        self.parameters: Mapping[str, Any] = {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "The expression, such as (3 + 4) * 2.",
                }
            },
            "required": ["expression"],
            "additionalProperties": False,
        }

    async def call(self, arguments: Mapping[str, Any]) -> str:
        value = evaluate(arguments["expression"])
        # Division gives floats: a model that asks for 6 / 2 expects 3. From 2**53 on, a float may
        # not be the number that its digits say.
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        return str(int(value) if is_whole else value)


def evaluate(expression: str) -> Number:
    """Return the value of an expression.

    Raises ToolError for other text, or a value beyond the limits.
    """
    if len(expression) > MAX_CHARS:
        raise ToolError(
            f"Error: the expression has {len(expression)} characters, at most {MAX_CHARS}"
        )
    try:
        value = _evaluate_node(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ToolError("Error: division by zero") from None
    except (OverflowError, RecursionError, MemoryError):
        raise ToolError("Error: the expression is too large") from None
    except (SyntaxError, ValueError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ToolError(
            f"Error: not an arithmetic expression ({reason}); valid are {_VALID}"
        ) from None
    return value


def _evaluate_node(node: ast.expr) -> Number:
    # bool is a subclass of int, but not a number here.
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _check_limits(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_evaluate_node(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _evaluate_node(node.left), _evaluate_node(node.right)
        # Before the computation: 9**9**9 would take the memory and the time of the whole run.
        if (
            isinstance(node.op, ast.Pow)
            and type(left) is type(right) is int
            and (left.bit_length() - 1) * right > MAX_BITS
        ):
            raise OverflowError
        return _check_limits(_BINARY[type(node.op)](left, right))
    raise ToolError(f"Error: {ast.unparse(node)[:80]!r} is not allowed; valid are {_VALID}")


def _check_limits(value: Any) -> Number:
    if isinstance(value, complex):
        raise ToolError("Error: the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError
    return value
