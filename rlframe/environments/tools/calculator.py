"""A calculator: sums, products, powers and roots of numbers."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlframe.environments.tools.base import Schema, Tool, ToolError

LONGEST_EXPRESSION = 1000
"""Greatest number of characters of an expression."""
LARGEST_BITS = 4096
"""Greatest size of a whole number, so that no expression takes long."""
MOST_DIGITS = 400
"""Greatest number of digits to round to: floats have fewer, and Python computes 10 to that power."""
BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
UNARY: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def _round(value: int | float, digits: int | None = None) -> int | float:
    if digits is not None and abs(digits) > MOST_DIGITS:
        raise ValueError(f"round takes at most {MOST_DIGITS} digits")
    return round(value, digits)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
    "sqrt": math.sqrt,
    "log": math.log,
    "exp": math.exp,
    "gcd": math.gcd,
}


@dataclass(kw_only=True, slots=True)
class CalculatorConfig:
    """No settings."""


class Calculator(Tool):
    """Evaluates arithmetic expressions."""

    def __init__(self, config: CalculatorConfig):
        pass

    @property
    def schemas(self) -> list[Schema]:
        """See Tool."""
        expression = {"type": "string", "description": "An arithmetic expression, such as (2 + 3) * 4 ** 2."}
        return [
            {
                "type": "function",
                "function": {
                    "name": "calculator",
                    "description": "Returns the value of an arithmetic expression.",
                    "parameters": {
                        "type": "object",
                        "properties": {"expression": expression},
                        "required": ["expression"],
                    },
                },
            }
        ]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See Tool."""
        expression = arguments.get("expression")
        if not isinstance(expression, str):
            raise ToolError(f"expression must be text, got {expression!r:.80}")
        return written(value_of(expression))


def value_of(expression: str) -> int | float:
    """Returns the value of an expression.

    Example:
        >>> value_of("12 * 13")
        156

    Raises:
        ToolError: it is none, has no value, or is too large.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ToolError(f"an expression must have at most {LONGEST_EXPRESSION} characters, got {len(expression)}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, ValueError, TypeError, ArithmeticError) as error:
        raise ToolError(f"{expression!r:.80} has no value: {error}") from None
    return value


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _checked(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            return UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return _checked(BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return _checked(FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"{ast.unparse(node)!r:.40} is no arithmetic")


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int):
        if abs(base) > 1 and base.bit_length() * exponent > LARGEST_BITS:
            raise ValueError("the result is too large")
    return _checked(base**exponent)


def _checked(value: Any) -> int | float:
    if isinstance(value, complex):
        raise ValueError("the result is no real number")
    if isinstance(value, int) and value.bit_length() > LARGEST_BITS:
        raise ValueError("the result is too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the result is not finite")
    return value


def written(value: int | float) -> str:
    """Returns a number as text: a whole one without a point, others with at most 12 digits."""
    return str(int(value)) if value == int(value) else f"{value:.12g}"


COMPONENT, CONFIG = Calculator, CalculatorConfig
