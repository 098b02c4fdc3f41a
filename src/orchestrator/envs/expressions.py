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

TOKEN = re.compile(r"\s*(\d+\.?\d*|\.\d+|\*\*|//|[-+*/%^()])\s*", re.ASCII)
Operation = Callable[[Fraction, Fraction], Fraction]
SUMS: dict[str, Operation] = {"+": operator.add, "-": operator.sub}
PRODUCTS: dict[str, Operation] = {
    "*": operator.mul,
    "/": operator.truediv,
    "//": lambda a, b: Fraction(a // b),
    "%": operator.mod,
}


class CalculationError(ValueError):
    """An expression without a value; the message is for its author."""


def calculate(expression: str) -> Fraction:
    """Returns the value of an expression. Raises CalculationError for other texts, and beyond the limits."""
    if len(expression) > MAX_LENGTH:
        raise CalculationError(f"the expression has {len(expression)} characters, at most {MAX_LENGTH} are allowed")
    reader = _Reader(_tokens(expression))
    value = reader.sum()
    if reader.next is not None:
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


def _tokens(expression: str) -> list[str]:
    found, end = [], 0
    while end < len(expression):
        match = TOKEN.match(expression, end)
        if match is None:
            raise CalculationError(f"unexpected {expression[end]!r}")
        found.append(match[1])
        end = match.end()
    return found


class _Reader:
    """Reads one expression from left to right; one method for each line of the grammar."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]
        self._depth = 0

    @property
    def next(self) -> str | None:
        return self._tokens[-1] if self._tokens else None

    def sum(self) -> Fraction:
        value = self._product()
        while self.next in SUMS:
            value = _apply(SUMS[self._tokens.pop()], value, self._product())
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while self.next in PRODUCTS:
            value = _apply(PRODUCTS[self._tokens.pop()], value, self._signed())
        return value

    def _signed(self) -> Fraction:
        """Reads a sign and what follows; counts the depth, as all nesting passes here."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise CalculationError(f"brackets, signs and powers nest deeper than {MAX_DEPTH}")
        if self.next in ("-", "+"):
            value = -self._signed() if self._tokens.pop() == "-" else self._signed()
        else:
            value = self._power()
        self._depth -= 1
        return value

    def _power(self) -> Fraction:
        base = self._atom()
        if self.next not in ("**", "^"):
            return base
        self._tokens.pop()
        return _raise_to(base, self._signed())

    def _atom(self) -> Fraction:
        if not self._tokens:
            raise CalculationError("the expression ends too early")
        token = self._tokens.pop()
        if token == "(":
            value = self.sum()
            if self.next != ")":
                raise CalculationError("a bracket is not closed")
            self._tokens.pop()
            return value
        if not token[-1].isdigit() and not token[0].isdigit():
            raise CalculationError(f"unexpected {token!r}")
        return Fraction(token)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _apply(operation: Operation, a: Fraction, b: Fraction) -> Fraction:
    if operation not in (operator.add, operator.sub, operator.mul) and not b:
        raise CalculationError("division by zero")
    return _limited(operation(a, b))


def _raise_to(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CalculationError("an exponent must be a whole number")
    if not base and exponent < 0:
        raise CalculationError("division by zero")
    if abs(exponent) * (_bits(base) - 1) > MAX_BITS:  # it has at least as many bits, and at most twice as many
        raise CalculationError("the result is too large")
    return _limited(base**exponent.numerator)


def _limited(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise CalculationError("the result is too large")
    return value
