"""The part of a completion that is its answer, and whether two answers are the same."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Literal

Extract = Literal["first_number", "last_number", "first_word", "text"]

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_WORD = re.compile(r"\w+")


def extract(text: str, how: Extract) -> str | None:
    """The answer in `text`, or None where there is none.

    >>> extract(" 45. Because 5 * 9 is 45.", "first_number")
    '45'
    """
    if how == "text":
        return text.strip() or None
    if how == "first_word":
        match = _WORD.search(text)
        return match[0] if match else None
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    return str(numbers[0 if how == "first_number" else -1]).replace(",", "")


def is_same(answer: str, expected: str) -> bool:
    """Equal as numbers where both are numbers, else equal as text up to outer space."""
    a, b = _number(answer), _number(expected)
    if a is not None and b is not None:
        return a == b
    return answer.strip() == expected.strip()


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip().replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
