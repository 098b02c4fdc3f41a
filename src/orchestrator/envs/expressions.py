"""Arithmetic on exact fractions, for untrusted expressions: no code is run, and every size has a limit.

sum      product + product - ...
product  signed * signed / signed // signed % ...
signed   - signed, + signed, power
power    atom ** signed, atom ^ signed, atom
atom     number, ( sum )
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

MAX_LENGTH = 200
"""Most characters of an expression; bounds the number of operations too."""
MAX_DEPTH = 20
"""Most brackets, signs and powers within each other."""
MAX_BITS = 4096
"""Largest numerator and denominator, in bits."""
DIGITS = 12
"""Significant digits of a result that is not whole."""

TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+|\*\*|//|[-+*/%^()])|(\S))", re.ASCII)
"""Matches a part of an expression, or a character that belongs to none."""
LEVELS: tuple[dict[str, Callable[[Fraction, Fraction], Fraction]], ...] = (
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": operator.truediv, "//": lambda a, b: Fraction(a // b), "%": operator.mod},
)
"""The operations of a sum, and those of a product, which bind closer."""


class CalculationError(ValueError):
    """An expression without a value; the message is for its author."""


def calculate(expression: str) -> Fraction:
    """Returns the value of an expression. Raises CalculationError for other texts, and beyond the limits."""
    if len(expression) > MAX_LENGTH:
        raise CalculationError(f"the expression has {len(expression)} characters, at most {MAX_LENGTH} are allowed")
    found = TOKEN.findall(expression)
    if strange := [other for _, other in found if other]:
        raise CalculationError(f"unexpected {strange[0]!r}")
    reader = _Reader([token for token, _ in found])
    try:
        value = reader.chain()
    except ZeroDivisionError:
        raise CalculationError("division by zero") from None
    if reader.next:
        raise CalculationError(f"unexpected {reader.next!r}")
    return value


def show(value: Fraction) -> str:
    """Shows a whole number in full, any other with twelve significant digits.

    >>> show(Fraction(1, 3)), show(Fraction(6, 3))
    ('0.333333333333', '2')
    """
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext(prec=DIGITS):
        return str(Decimal(value.numerator) / Decimal(value.denominator))


class _Reader:
    """Reads one expression from left to right."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = ["", *reversed(tokens)]
        self._depth = 0

    @property
    def next(self) -> str:
        """Returns the next token; empty at the end."""
        return self._tokens[-1]

    def chain(self, level: int = 0) -> Fraction:
        """Reads a sum, or with level 1 a product."""
        if level == len(LEVELS):
            return self._signed()
        value = self.chain(level + 1)
        while operation := LEVELS[level].get(self.next):
            self._tokens.pop()
            value = _limited(operation(value, self.chain(level + 1)))
        return value

    def _signed(self) -> Fraction:
        """Reads a sign or a power; counts the depth, as all nesting passes here."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise CalculationError(f"brackets, signs and powers nest deeper than {MAX_DEPTH}")
        if self.next in ("-", "+"):
            value = -self._signed() if self._tokens.pop() == "-" else self._signed()
        else:
            value = self._atom()
            if self.next in ("**", "^"):
                self._tokens.pop()
                value = _raise_to(value, self._signed())
        self._depth -= 1
        return value

    def _atom(self) -> Fraction:
        token = self._tokens.pop()
        if token == "(":
            value = self.chain()
            if self._tokens.pop() != ")":
                raise CalculationError("a bracket is not closed")
            return value
        if not token:
            raise CalculationError("the expression ends too early")
        if not token[-1].isdigit() and not token[0].isdigit():
            raise CalculationError(f"unexpected {token!r}")
        return Fraction(token)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _raise_to(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CalculationError("an exponent must be a whole number")
    if abs(exponent) * (_bits(base) - 1) > MAX_BITS:  # it has at least as many bits, and at most twice as many
        raise CalculationError("the result is too large")
    return _limited(base**exponent.numerator)


def _limited(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise CalculationError("the result is too large")
    return value
