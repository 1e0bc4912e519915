"""Whether two answers are equal by algebra: math-verify with guards, in a worker process (rewards/pool.py) that can be killed.

math-verify's own time limits are off: they rest on SIGALRM, which no big-integer operation heeds. What its verdicts are not
trusted with is looked at here: parts of an answer that its parser drops, numbers too large to write down, values that agree
only because both are tiny, and chains of equations such as 7 = 5.
"""

import logging
import math
import re
from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace

import sympy
from latex2sympy2_extended import latex2sympy2
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.relational import Relational

from vipfast.rewards.answers import bounded

MOST_DIGITS = 10_000
"""Numbers with more are equal only if written alike."""
DEEPEST = 10
"""Brackets within brackets beyond which nothing is parsed: the parser's time doubles with every pair that is not needed."""
MOST_TERMS = 500
"""Expressions that multiply out to more are equal only if they differ in the order of their parts."""
MOST_PARTS = 100
"""Commas and bars beyond which nothing is parsed: a set's element takes 20 ms."""
MOST_ENTRIES = 16
"""Entries of a matrix with letters or formulas in it whose determinant is formed: its terms double with every row."""
_LATEX = [LatexExtractionConfig(boxed_match_priority=0)]
_DETERMINANT = re.compile(r"\\det|\{vmatrix\}|\|\s?\\begin")
_ENVIRONMENT = re.compile(r"\\det|\\(?:begin|end)\{\w+\}")
_NESTED = re.compile(r"\\(?:frac|sqrt)|\^")
_LONG_NUMBER = re.compile(r"\d{300}")
_HARD_LIMIT = re.compile(r"\\lim(?![a-z]).*(?:\\binom|\\Gamma|!|\^\s?\{?\s?\d\d)")
_REFUSALS = (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError)
"""What sympy raises on expressions that it cannot compare."""
_UNFINISHED = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
_POINTS = (1.307, 17.683)
_ROUGHLY = 0.05
_SIDE_BY_SIDE = re.compile(r"\d\s+[\d.]")
"""math-verify adds such numbers up, as if they were mixed fractions."""


def judge() -> Callable:
    """The worker's function: gold, answer -> (whether the gold can be graded against, right, the answer's spelling); without
    an answer the first alone counts."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The parser evaluates these as it reads, whatever their size.
    unevaluated = {name: partial(getattr(sympy, name), evaluate=False) for name in ("gamma", "binomial")}
    latex2sympy2.sympy = SimpleNamespace(**vars(sympy) | unevaluated | {"nsimplify": _small_nsimplify})
    parsed("1")  # builds regexes and grammar before the first task's clock runs

    def call(gold: str, answer: str | None) -> tuple[bool, bool, str]:
        if answer is None or not usable(gold):
            return usable(gold), False, bounded(answer or "")
        try:
            return True, *judged(gold, answer)
        except _REFUSALS:
            return True, False, bounded(answer)

    return call


def _small_nsimplify(expression):
    """The arguments of gcd and lcm, which the parser evaluates; it takes an error for a text that it cannot parse."""
    if num_digits(expression) > MOST_DIGITS:
        raise ValueError("a number too large to write down")
    return sympy.nsimplify(expression)


@lru_cache(4096)
def parsed(text: str) -> sympy.Basic | sympy.MatrixBase | None:
    """The expression of a tidied answer, unevaluated; None if it is none, or if the parser leaves digits out."""
    if _SIDE_BY_SIDE.search(text) or _depth(text) > DEEPEST or text.count(",") + text.count("|") > MOST_PARTS:
        return None
    if _large_determinant(text) or _HARD_LIMIT.search(text) or _LONG_NUMBER.search(text):
        return None
    found = parse(r"\boxed{" + text + "}", _LATEX, parsing_timeout=None)
    if len(found) < 2 or isinstance(found[0], str):
        return None
    read = found[1]
    digits = partial(re.sub, r"[^1-9]", "")
    return found[0] if digits(text) == digits(read) or text in (".5", "0.5") else None


def _large_determinant(text: str) -> bool:
    most = 4 if _NESTED.search(text) else MOST_ENTRIES
    if not _DETERMINANT.search(text) or text.count("&") + text.count(r"\\") < most:
        return False
    return re.search("[A-Za-z]", _ENVIRONMENT.sub("", text)) is not None


def _depth(text: str) -> int:
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    return deepest


@lru_cache(4096)  # every rollout of a prompt asks
def usable(gold: str) -> bool:
    """Whether a gold parses whole, and equals itself."""
    expression = parsed(gold)
    return expression is not None and (num_digits(expression) > MOST_DIGITS or _verified(expression, expression))


def judged(gold: str, answer: str) -> tuple[bool, str]:
    r"""Whether the answer equals a usable gold, and the answer's spelling. Of ``a \approx b`` a counts, and b must be near."""
    exact, *rough = answer.split(r"\approx", 2)
    expected, found = parsed(gold), parsed(exact)
    if isinstance(found, sympy.Symbol) and rough:  # x \approx 5.1 names it
        found, rough = parsed(rough[0]), rough[1:]
    if found is None or not all(_roughly(found, part) for part in rough):
        return False, bounded(answer)
    if max(num_digits(expected), num_digits(found)) > MOST_DIGITS:
        return expected == found, bounded(answer)
    if _unlike(expected, found):
        return False, bounded(answer)
    if max(num_terms(expected), num_terms(found)) > MOST_TERMS:
        return expected.doit() == found.doit(), bounded(answer)
    if {_brackets(gold, expected), _brackets(answer, found)} == {"set", "ordered"}:  # which math-verify takes for each other
        return False, bounded(answer)
    if _is_interval(gold, expected) and isinstance(found, sympy.FiniteSet):  # (a, b) without brackets, say
        return False, bounded(answer)
    if isinstance(expected, sympy.MatrixBase) != isinstance(found, sympy.MatrixBase):
        expected, found = _as_tuple(expected), _as_tuple(found)
    right = ("%" in gold + answer or not _differ(expected, found)) and _verified(expected, found)
    if right and not isinstance(expected, Relational):
        *chain, last = _sides(found)
        right = not any(_differ(side, last) for side in chain)
    return bool(right), _spelled(found, answer)


def _unlike(expected, found) -> bool:
    """Whether no algebra is due: an answer left as an integral, or with matrices or letters where the gold is a number."""
    if isinstance(expected, sympy.Expr) and _holds_matrix(found) and not _holds_matrix(expected):
        return True
    if found.has(sympy.Integral) and not expected.has(sympy.Integral):
        return True
    if not isinstance(expected, sympy.Expr) or expected.free_symbols:
        return False
    sides = _sides(found)
    return all(isinstance(side, sympy.Expr) and side.free_symbols for side in sides)


def _holds_matrix(expression) -> bool:
    return isinstance(expression, sympy.MatrixBase) or any(map(_holds_matrix, getattr(expression, "args", ())))


def _roughly(found, part: str) -> bool:
    values = [_sides(side)[-1] for side in (found, parsed(part))]
    if not all(isinstance(side, sympy.Expr) and num_digits(side) < 300 and not side.free_symbols for side in values):
        return False
    a, b = (complex(side.evalf(15)) for side in values)
    return abs(a - b) <= _ROUGHLY * max(abs(a), abs(b))


def _brackets(text: str, expression) -> str | None:
    """Whether braces hold the elements, or brackets that keep them in order; None: neither is sure."""
    expression = _sides(expression)[-1]
    if isinstance(expression, sympy.Tuple | sympy.Interval):
        return "ordered"
    return "set" if isinstance(expression, sympy.FiniteSet) and r"\{" in text else None


def _is_interval(gold: str, expression) -> bool:
    """Whether a gold is an inequality, or an interval that cannot be a pair."""
    if isinstance(expression, Relational | sympy.And) and not isinstance(expression, sympy.Eq | sympy.Ne):
        return True
    expression = _sides(expression)[-1]
    return isinstance(expression, sympy.Union) or isinstance(expression, sympy.Interval) and not _is_open(expression)


def _is_open(interval: sympy.Interval) -> bool:
    return bool(interval.left_open and interval.right_open)


def _as_tuple(expression):
    """A row or column of a matrix, and an open interval, which may be a pair, as a tuple; else the expression itself."""
    if isinstance(expression, sympy.MatrixBase) and 1 in expression.shape:
        return sympy.Tuple(*expression)
    if isinstance(expression, sympy.Interval) and _is_open(expression):
        return sympy.Tuple(expression.start, expression.end)
    return expression


def _verified(gold, answer) -> bool:
    return verify([gold], [answer], timeout_seconds=None)


def _sides(expression) -> list:
    """a, b, c of a = b = c; a lone expression is its own."""
    parts = getattr(expression, "_unsorted_args", [expression])
    if not all(isinstance(part, sympy.Eq) for part in parts):
        return [expression]
    return [part.lhs for part in parts] + [parts[-1].rhs]


def _differ(a, b) -> bool:
    """Whether two expressions are told apart by their values, at each of two points. It spares wrong answers all algebra."""
    if not all(
        isinstance(side, sympy.Expr) and not isinstance(side, sympy.Symbol) and not side.has(*_UNFINISHED) for side in (a, b)
    ):
        return False
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    for point in _POINTS if symbols else _POINTS[:1]:
        values = {symbol: sympy.Float(point + 0.271 * i) for i, symbol in enumerate(symbols)}
        try:
            at_a, at_b = (complex(side.subs(values).evalf(15)) for side in (a, b))
        except (TypeError, OverflowError):  # f(x) has no value, 10.0^400 none that a float holds
            return False
        largest = max(abs(at_a), abs(at_b))
        if not math.isfinite(largest) or abs(at_a - at_b) <= 2e-6 * largest:
            return False
    return True


def _spelled(expression, text: str) -> str:
    if getattr(expression, "is_number", False) and not expression.has(*_UNFINISHED):
        expression = expression.doit()
    return bounded(str(expression)) if num_digits(expression) < 1000 else bounded(text)


def num_digits(expression) -> float:
    """An upper estimate of the digits of the largest number that evaluating an expression writes down; inf if beyond all."""
    if isinstance(expression, sympy.Rational):
        return max(expression.p.bit_length(), expression.q.bit_length()) * math.log10(2)
    if isinstance(expression, sympy.MatrixBase):
        return max(map(num_digits, expression.flat()), default=0.0)
    if not isinstance(expression, sympy.Basic) or not expression.args:
        return 1.0
    sizes = [num_digits(part) for part in expression.args]
    if isinstance(expression, sympy.Pow):
        if expression.base.is_number and not expression.base.is_Rational and sizes[1] > 2.5:  # (1 + sqrt 2)^2000
            return math.inf
        number = isinstance(expression.base, sympy.MatrixBase) or expression.base.is_number
        return sizes[0] * _size(sizes[1]) if expression.exp.is_number and number else sum(sizes)
    if isinstance(expression, sympy.exp) and expression.is_number:
        return _size(sizes[0])
    if isinstance(expression, sympy.factorial | sympy.factorial2 | sympy.subfactorial | sympy.binomial | sympy.gamma):
        return _size(max(sizes)) * max(*sizes, 1.0)
    if isinstance(expression, sympy.Sum | sympy.Product):
        return sum(sizes) if max(sizes) < 5 else math.inf
    return sum(sizes)


def num_terms(expression) -> float:
    """An upper estimate of the terms that multiplying out an expression with letters writes down."""
    if not getattr(expression, "free_symbols", None):
        return 1
    parts = [num_terms(part) for part in (expression.flat() if isinstance(expression, sympy.MatrixBase) else expression.args)]
    if isinstance(expression, sympy.Pow) and expression.exp.is_real and expression.exp.is_number:
        power = abs(int(expression.exp) if expression.exp.is_Integer else expression.exp.evalf(15))
        if parts[0] == 1:
            return 1 if power <= MOST_DIGITS else math.inf
        if max(power, parts[0]) > MOST_TERMS:
            return math.inf
        return math.comb(int(power) + parts[0] - 1, parts[0] - 1) if power >= 1 else parts[0]
    return math.prod(parts) if isinstance(expression, sympy.Mul) else max(sum(parts), 1)


def _size(digits: float) -> float:
    return 10.0**digits if digits < 300 else math.inf
