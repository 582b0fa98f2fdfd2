r"""Numbers in texts: one pattern for all places that look for one, and one way of writing them.

    1,000.50   1 000.50 with a no-break space  ->  1000.50
    1'000.50   1_000.50   1{,}000.50  1.000,50 ->  1000.50
    -5 with any dash for the minus sign        ->  -5
    +5         -$5                             ->  5   -5
    .5         3,14       6.5E-3               ->  0.5   3.14   6.5e-3

1 000 with a plain space is one number if a group begins with 0; 100 200 is two numbers.

A hyphen after a letter, a digit or a closing bracket is no sign: 3-5, 2024-05-01, GPT-4. Commas
between digits group thousands where they can (1,000 and 1,00,000); a single comma that cannot is a
decimal comma, except in (3,4), and several are a list. Digits of other scripts count as ASCII
digits.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Iterator
from fractions import Fraction

MAX_CHARS = 400
"""Longest number that has a value; a reply may be one digit ten thousand times."""

_CHARACTERS = str.maketrans(
    # Hyphens, dashes and signs that are written as a minus; then signs and separators of other
    # scripts.
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-")
    | {"\uff0b": "+", "\ufe62": "+", "\u066b": ".", "\uff0e": ".", "\u066c": ",", "\u2044": "/"}
)
_OTHER_DIGIT = re.compile(r"(?![0-9])\d")
_FRACTION = re.compile(
    r"([0-9]?)\\[cdt]?frac *(?:\{ *(-?[0-9.]{1,50}) *\}|([0-9])) *(?:\{ *([0-9.]{1,50}) "
    r"*\}|([0-9]))"
)
"""LaTeX's fraction of two numbers, of which one of a single digit needs no braces."""

_NOT_MORE = r"(?![0-9]|[,.][0-9])"
_MARK = r"(?:\{,\}|\\[,:; ]|,?\\!|~|['\u2019_\u00a0\u2007\u2009\u202f])"
"""Mark between groups of three digits that means nothing else, unlike a comma or a period."""
_EXPONENT = r"(?:[eE][-+]?[0-9]{1,3}(?!\w))?"
MAGNITUDE = (
    "(?:"
    # Groups are bounded, so that the time for a long list is not quadratic.
    r"[1-9][0-9]{0,2}(?:,[0-9]{3}){1,20}(?:\.[0-9]+)?(?![0-9]|,[0-9])"
    r"|[1-9][0-9]?(?:,[0-9]{2}){1,20},[0-9]{3}(?:\.[0-9]+)?(?![0-9]|,[0-9])"  # lakh and crore
    rf"|[1-9][0-9]{{0,2}}(?:{_MARK}[0-9]{{3}}){{1,20}}(?:[.,][0-9]+)?{_NOT_MORE}"
    # A space groups thousands if a group begins with 0, which no number of a list does.
    r"|[1-9][0-9]{0,2}(?: [0-9]{3}){0,9} 0[0-9]{2}(?: [0-9]{3}){0,9}(?:[.,][0-9]+)?(?! "
    r"?[0-9]|[,.][0-9])"
    rf"|[1-9][0-9]{{0,2}}(?:\.[0-9]{{3}}){{1,20}},[0-9]+{_NOT_MORE}"
    rf"|[1-9][0-9]{{0,2}}(?:\.[0-9]{{3}}){{2,20}}{_NOT_MORE}"
    rf"|(?<![0-9],)(?!(?<=[(\[])[0-9]+,[0-9]+[)\]])[0-9]++,[0-9]++{_NOT_MORE}"  # (3,4) is a list
    r"|[0-9]++(?:\.[0-9]++)?"
    r"|(?<![\w.)\]}])\.[0-9]++"
    f"){_EXPONENT}"
)
"""Regular expression, without groups, of a number without a sign in a text of `convert_digits`.
"""
_SIGN = (
    r"(?:(?<![-+\w)\]}%\u00b0])[-+]"
    r"|(?<=[=\u2248:(])[ \t]*[-+][ \t]+)"  # a dash at the beginning of a line is a bullet
)
_CURRENCY = r"(?:[A-Z]{0,3}\\?[$\u00a2-\u00a5\u0e3f\u20a0-\u20c0\uff04\uffe1\uffe5\uffe6] ?)?"
_DIVISOR = r"(?:/(?P<divisor>[0-9]++)(?![/.,]?[0-9]))?"
# No part of a date, 5/1/2024, is a fraction: its divisor may not have one of its own, nor be one.
_NUMBER = re.compile(
    rf"(?:(?P<sign>{_SIGN}){_CURRENCY})?(?P<divides>(?<=[0-9]/))?"
    rf"(?P<magnitude>{MAGNITUDE})(?(divides)|{_DIVISOR})"
)
_ALONE = re.compile(rf"^{_CURRENCY}")
"""Currency before a number without a sign."""
_UNFINISHED = re.compile(r"(?:[\s.,'\u2019_\\{}/+~-]|\\[!:;])*(?:[eE][-+]?)?")
"""Characters after a number at the end of a cut text, with which the number could go on."""


def convert_digits(text: str) -> str:
    """Return the text with ASCII digits, minus signs and decimal points."""
    return _OTHER_DIGIT.sub(
        lambda digit: str(unicodedata.decimal(digit[0])), text.translate(_CHARACTERS)
    )


def find_numbers(text: str) -> list[str]:
    """Return the numbers in a text, all written in one way.

    Example:
        >>> find_numbers("between -$1,000.50 and 3/4")
        ['-1000.50', '3/4']
    """
    return [_format_match(match) for match in _find_matches(text)]


def find_last_number(text: str, *, is_cut_off: bool = False) -> str | None:
    """Return the last number, as `find_numbers`; None if there is none.

    None too for a number that might go on after a cut.
    """
    last = deque(_find_matches(text), maxlen=1)
    if not last or (is_cut_off and _UNFINISHED.fullmatch(last[0].string, last[0].end())):
        return None
    return _format_match(last[0])


def parse_value(text: str) -> Fraction | None:
    """Return the value of a text that is one number; None for any other.

    None too for a code (007), and for digits on both sides of a comma that may be a list (3,14).
    """
    if len(text) > MAX_CHARS:
        return None
    match = _NUMBER.fullmatch(_ALONE.sub("", _normalize(text.strip().removesuffix("."))))
    if (
        match is None
        or re.match("0[0-9]", match["magnitude"])
        or _is_decimal_comma(match["magnitude"])
    ):
        return None
    try:
        whole, _, divisor = _format_match(match).partition("/")
        return Fraction(whole) / Fraction(divisor or 1)
    except ZeroDivisionError:
        return None


def same_answer(expected: str, answer: str) -> bool:
    """Return True for equal texts, surrounding spaces aside, and for two numbers of equal value."""
    expected, answer = expected.strip(), answer.strip()
    if expected == answer:
        return True
    value = parse_value(expected)
    return value is not None and value == parse_value(answer)


def _find_matches(text: str) -> Iterator[re.Match[str]]:
    return _NUMBER.finditer(_normalize(text))


def _normalize(text: str) -> str:
    """Return the text with ASCII digits, LaTeX's commas, and simple fractions as 1/2.

    3 1/2 stays two numbers.
    """

    # \\frac in a text of LaTeX; a digit before it is a whole number.
    def separate(part: re.Match[str]) -> str:
        return f"{part[1]}{' ' * bool(part[1])}{part[2] or part[3]}/{part[4] or part[5]}"

    return _FRACTION.sub(separate, convert_digits(text).replace("{,}", ","))


def _format_match(match: re.Match[str]) -> str:
    sign = "-" if "-" in (match["sign"] or "") else ""
    digits, mark, exponent = match["magnitude"].lower().partition("e")
    digits = re.sub(f"{_MARK}| ", "", digits)
    if _is_decimal_comma(digits):
        digits = digits.replace(".", "").replace(",", ".")
    elif digits.count(".") > 1:
        digits = digits.replace(".", "")
    digits = digits.replace(",", "")
    whole = f"{'0' * digits.startswith('.')}{digits}{mark}{exponent}"
    return f"{sign}{whole}/{match['divisor']}" if match["divisor"] else f"{sign}{whole}"


def _is_decimal_comma(magnitude: str) -> bool:
    """Return True if there is a single comma, and it is no thousands separator."""
    before, comma, after = re.sub(f"{_MARK}| ", "", magnitude).partition(",")
    if not comma or "," in after or "." in after:
        return False
    return "." in before or len(after) != 3 or len(before) > 3 or before.startswith("0")
