"""The calculator: worked examples, exactness against Python's own fractions, and nothing sampled that raises or runs on."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vipfast.tools.calculator import Calculator

CALCULATOR = Calculator()


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("7 / 2", "3.5"),
        ("-1 / 8", "-0.125"),
        ("1 / 3", "1/3 ≈ 0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("7 % 3", "1"),
        ("2 ** 10", "1024"),
        ("3 ^ 2 + 1", "10"),  # a power, not the exclusive or
        ("2 ** -2", "0.25"),
        ("1_000 * 3", "3000"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("sqrt(16 / 9)", "4/3 ≈ 1.33333333333"),
        ("sqrt(2)", "1.41421356237"),
        ("8 ** (1 / 3)", "2"),
        ("round(2.675, 2)", "2.68"),  # binary floats would give 2.67
        ("max(1, 5/2, 2)", "2.5"),
        ("factorial(20)", "2432902008176640000"),
        ("comb(10, 3) + gcd(12, 18)", "126"),
        ("1e3", "1000"),
        ("12345678901234567.5 - 12345678901234567", "0.5"),  # a float has no such half
        ("0.1000000000000000055 - 0.1", "11/2000000000000000000 ≈ 5.5e-18"),
        ("123456789012345678901234567890.25 * 4", "493827156049382715604938271561"),
        ("1_0.5_0 + 1. + .5 + 1.e2", "112"),
        ("(1.5\n+ 2.25)", "3.75"),
        ("+".join(["1"] * 120), "120"),
    ],
)
def test_worked_examples(expression, value):
    assert CALCULATOR(1.0, expression=expression).text == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("10 ** 10 ** 10", "too large"),
        ("(9 ** 999) ** 999", "too large"),
        ("2.5 ** 1e300", "too large"),
        ("factorial(factorial(9))", "too large"),
        ("comb(10**9, 5*10**8)", "too large"),
        ("1e999", "too large"),
        ("1e999999999", "too large"),
        ("1e" + "9" * 400, "too large"),
        ("1e-999999999", "too small"),
        ("exp(1000)", "too large"),
        ("(-8) ** (1/3)", "no real number"),
        ("sqrt(-1)", "error"),
        ("log(0)", "error"),
        ("__import__('os')", "only numbers"),
        ("(1).__class__", "only numbers"),
        ("[1, 2]", "only numbers"),
        ("2pi", "only numbers"),
        ("1j * 2", "only numbers"),
        ("True + 1", "only numbers"),
        ("factorial(2.5)", "whole numbers"),
        ("max()", "number of arguments"),
        ("sqrt(1, 2, 3)", "number of arguments"),
        ("1 +", "no arithmetic expression"),
        ("(" * 300, "no arithmetic expression"),
        ("1" * 501, "more than 500 characters"),
        ("-" * 400 + "1", "nested"),
        ("", "no arithmetic expression"),
    ],
)
def test_what_cannot_be_worked_out_is_told_at_once(expression, why):
    start = time.process_time()
    output = CALCULATOR(1.0, expression=expression)
    assert output.error and output.text.startswith("error: ") and why in output.text
    assert time.process_time() - start < 0.2


numbers = st.integers(-999, 999).map(lambda n: (f"({n})", Fraction(n)))
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}


def joined(parts):
    (left, a), sign, (right, b) = parts
    return f"({left} {sign} {right})", None if a is None or b is None or (sign == "/" and b == 0) else OPERATIONS[sign](a, b)


@given(st.recursive(numbers, lambda part: st.tuples(part, st.sampled_from("+-*/"), part).map(joined), max_leaves=12))
def test_fractions_are_exact(case):
    expression, value = case
    output = CALCULATOR(1.0, expression=expression)
    assert output.error == (value is None)
    if value is not None:
        assert Fraction(output.text.split(" ≈ ")[0]) == value


@given(st.integers(0, 10**40), st.integers(0, 40), st.integers(-60, 60))
def test_a_decimal_is_what_its_digits_say(digits, places, exponent):
    whole, rest = divmod(digits, 10**places)
    output = CALCULATOR(1.0, expression=f"{whole}.{rest:0{places}d}e{exponent}")
    assert Fraction(output.text.split(" ≈ ")[0]) == Fraction(digits, 10**places) * Fraction(10) ** exponent


@settings(deadline=500)
@given(st.text(alphabet="0123456789.+-*/%()^ ,eEpisqrtfacolx_\n\0é√", max_size=60) | st.text(max_size=40))
def test_no_text_raises(expression):
    assert CALCULATOR(1.0, expression=expression).text
