"""A calculator: exact fractions where it can, floats where it must, and no expression that runs away."""

import ast
import math
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

from vipfast.tools.base import Output

LONGEST, DEEPEST, BITS = 500, 150, 4096
"""Characters and nested operations of an expression, and bits of a number on the way."""

LARGEST_EXPONENT = 308
"""Of ten, in a number as it is written: what a float reaches."""

Number = Fraction | float

_ALLOWED = re.compile(r"[\w\s.,+\-*/%()]*", re.ASCII)
_GLUED = re.compile(r"\d(?:[A-DF-Za-df-z]|[eE](?![+\-\d]))")
_SPELLINGS = str.maketrans({"^": "**", "×": "*", "·": "*", "÷": "/", "\u2212": "-"})


class Refused(ValueError):
    """The expression cannot be worked out; the message says why."""


class Calculator:
    """Implements ``tools.base.Tool``; a call takes microseconds."""

    name = "calculator"
    description = (
        "Works out an arithmetic expression exactly, with + - * / // % ** and parentheses, the functions sqrt, abs, round, "
        "floor, ceil, min, max, factorial, gcd, lcm, comb, log, exp, sin, cos, tan, and the numbers pi and e."
    )
    parameters = {"expression": "The expression, e.g. (3 + 4) * 2 / 7"}
    beside = False

    def __call__(self, time_s: float, expression: str) -> Output:
        try:
            return Output(_written(_bounded(_value(_parsed(expression), DEEPEST))))
        except ZeroDivisionError:
            return Output("error: division by zero", error=True)
        except OverflowError:
            return Output("error: a number is too large", error=True)
        except ValueError as error:
            return Output(f"error: {error}", error=True)

    def close(self) -> None: ...


def _parsed(expression: str) -> ast.expr:
    text = expression.translate(_SPELLINGS).strip()
    if len(text) > LONGEST:
        raise Refused(f"the expression has more than {LONGEST} characters")
    # Nothing but numbers, names and operators reaches the parser, which is lenient in other places and warns in some.
    if not _ALLOWED.fullmatch(text) or _GLUED.search(text):
        raise Refused("only numbers, + - * / // % **, parentheses and the named functions are understood")
    try:
        parsed = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise Refused("this is no arithmetic expression") from error
    for node in ast.walk(parsed):
        if isinstance(node, ast.Constant) and isinstance(node.value, float):
            node.value = _literal(ast.get_source_segment(text, node))
    return parsed


def _literal(text: str) -> Fraction:
    """A decimal number to its last digit, which a float would lose."""
    digits, _, exponent = text.replace("_", "").lower().partition("e")
    if abs(int(exponent or 0)) > LARGEST_EXPONENT:  # told before a power of ten is made of it
        raise Refused("a number is too large" if int(exponent) > 0 else "a number is too small")
    return Fraction(Decimal(digits)) * Fraction(10) ** int(exponent or 0)


def _value(node: ast.expr, depth: int) -> Number:
    if depth == 0:
        raise Refused(f"more than {DEEPEST} operations are nested")
    match node:
        case ast.Constant(value=int() | Fraction() as value) if not isinstance(value, bool):
            return _bounded(Fraction(value))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _value(operand, depth - 1)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_value(left, depth - 1), _value(right, depth - 1)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            values = [_value(arg, depth - 1) for arg in args]
            try:
                return _bounded(_FUNCTIONS[name](*values))
            except TypeError as error:
                raise Refused(f"{name} takes another number of arguments") from error
    raise Refused("only numbers, + - * / // % **, parentheses and the named functions are understood")


def _bounded(value: Number) -> Number:
    if isinstance(value, complex):
        raise Refused("the result is no real number")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Refused("a number is too large")
    elif value.numerator.bit_length() + value.denominator.bit_length() > BITS:
        raise Refused("a number is too large")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        # Told before it is worked out: the bits of a power are at least those of (|base| - 1/2) times the exponent.
        bits = (base.numerator.bit_length() - 1) + (base.denominator.bit_length() - 1)
        if bits * abs(exponent) > BITS or abs(exponent) > BITS and abs(base) not in (0, 1):
            raise Refused("a number is too large")
    return base**exponent


def _root(value: Number) -> Number:
    if isinstance(value, Fraction) and value >= 0:
        top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if top * top == value.numerator and bottom * bottom == value.denominator:
            return Fraction(top, bottom)
    return math.sqrt(value)


def _whole(function: Callable, largest: int = 2**BITS) -> Callable:
    """``function`` over whole numbers only, none of them above ``largest``."""

    def applied(*values: Number) -> Fraction:
        if any(value != int(value) for value in values):
            raise Refused("this function takes whole numbers")
        if any(abs(value) > largest for value in values):
            raise Refused("a number is too large")
        return Fraction(function(*(int(value) for value in values)))

    return applied


def _exact(function: Callable) -> Callable:
    return lambda *values: Fraction(function(*values))


_CONSTANTS = {"pi": math.pi, "e": math.e}
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b), ast.Mod: operator.mod, ast.Pow: _power,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable] = {
    "sqrt": _root, "abs": abs, "min": lambda a, *more: min(a, *more) if more else a,
    "max": lambda a, *more: max(a, *more) if more else a,
    "floor": _exact(math.floor), "ceil": _exact(math.ceil),
    "round": lambda value, digits=Fraction(0): Fraction(round(Fraction(value), _digits(digits))),
    "factorial": _whole(math.factorial, 500), "comb": _whole(math.comb, 1000), "gcd": _whole(math.gcd), "lcm": _whole(math.lcm),
    "log": lambda value, *base: math.log(value, *base), "exp": math.exp,
    "sin": math.sin, "cos": math.cos, "tan": math.tan,
}  # fmt: skip


def _digits(digits: Number) -> int:
    if digits != int(digits) or abs(digits) > 100:
        raise Refused("round takes at most 100 digits")
    return int(digits)


def _written(value: Number) -> str:
    """Whole numbers and short decimals as such, other fractions as n/d ≈ decimal, floats to 12 digits."""
    if isinstance(value, float):
        return f"{value:.12g}"
    if value.denominator == 1:
        return str(value.numerator)
    digits = next((d for d in range(1, 16) if (value * 10**d).denominator == 1), None)
    if digits is not None and abs(value) < 10**15:
        scaled = abs(int(value * 10**digits))
        whole, rest = divmod(scaled, 10**digits)
        return f"{'-' if value < 0 else ''}{whole}.{rest:0{digits}d}"
    return f"{value.numerator}/{value.denominator} ≈ {float(value):.12g}"
