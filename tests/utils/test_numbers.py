"""Numbers as strangers write them."""

import time

import pytest

from rl.utils.numbers import find_last_number, find_numbers, parse_value, same_answer


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("The total is 1,000.", "1000"),
        ("1,000,000.5 and 12,34,567", "1000000.5 1234567"),
        ("1, 2, 3 or 1,2,3", "1 2 3 1 2 3"),
        (
            "1\u00a0000\u00a0000, 1\u202f000, 1'000, 1_000, 1{,}000, 10\\,000",
            "1000000 1000 1000 1000 1000 10000",
        ),
        ("1,\\!000, 1\\ 000, 1~000", "1000 1000 1000"),
        ("1 000, 12 050 000.5 or 1 000,50", "1000 12050000.5 1000.50"),
        ("100 200 300, 12 345, 1 0000, 1 000 1", "100 200 300 12 345 1 0000 1 000 1"),
        ("(3,4) or [1,2] or (1,000)", "3 4 1 2 1000"),
        ("1.000.000 or 1.000,50 or 1.000", "1000000 1000.50 1.000"),
        ("3,14 or 0,125 or 12345,678", "3.14 0.125 12345.678"),
        ("3{,}14 and 1{,}000 and 1{,}234{,}567", "3.14 1000 1234567"),
        ("\u22125, \u20135, -5, +5", "-5 -5 -5 5"),
        ("= .5 and -.5, so...5", "0.5 -0.5 5"),
        ("-$5, $-5$, \u2212\u20ac5, \\$5, -\u20a95, -US$5", "-5 -5 -5 5 -5 -5"),
        ("x = - 5; x = \u2212 5; (- 5)", "-5 -5 -5"),
        ("- 5 apples", "5"),
        ("3-5, 3 - 5, 3\u20135, 2024-05-01, GPT-4, x-5, f(x)-5", "3 5 3 5 3 5 2024 05 01 4 5 5"),
        ("(3,-5) and {-5}", "3 -5 -5"),
        ("5%, 5 kg, 5.", "5 5 5"),
        ("6.5E-3, 1e5, 2e10x", "6.5e-3 1e5 2 10"),
        ("1/2, -\\frac{1}{2}, 10/2 = 5, 5/1/2024", "1/2 -1/2 10/2 5 5 1 2024"),
        ("3\\frac{1}{2}", "3 1/2"),
        ("\\frac12, -\\frac 1{20}, \\frac{-1}{2}, \\cfrac{ 3 }{4}", "1/2 -1/20 -1/2 3/4"),
        ("\u0663\u066b\u0661\u0664 \uff11\uff12\uff13", "3.14 123"),
        ("12:30, 1.2.3, 0b1010", "12 30 1.2 3 0 1010"),
        ("none", ""),
    ],
)
def test_every_writing_of_a_number_is_read_alike(text, numbers):
    assert find_numbers(text) == numbers.split()


@pytest.mark.parametrize(
    ("expected", "answer", "same"),
    [
        ("1,000", "1000", True),
        ("1000", "1,000.0", True),
        ("5", "5.0", True),
        ("-5", "\u22125", True),
        ("0.5", " .5\n", True),
        ("1/2", "0.5", True),
        ("0.75", "1.5/2", True),
        ("yes", " yes", True),
        ("5", "$5", True),
        ("-5", "\u20ac-5", True),
        ("5", "$5$", False),
        ("00501", "501", False),  # a code, not a number
        ("1,2", "1.2", False),  # it may be a list
        ("5", "-5", False),
        ("5", "5 or 6", False),
        ("1/0", "2/0", False),
    ],
)
def test_answers_are_equal_by_text_or_by_value(expected, answer, same):
    assert same_answer(expected, answer) is same


@pytest.mark.parametrize("end", ["", ".", ",", " ", ".\n", "/", "e", "\\,", "e-", "E+", "~", "\\!"])
def test_a_number_at_the_end_of_a_cut_text_might_go_on(end):
    assert find_last_number(f"5, no, 12{end}", is_cut_off=True) is None
    assert find_last_number(f"5, no, 12{end}") == "12"


@pytest.mark.parametrize("end", [". So", "**", "$", ")", " apples"])
def test_a_number_that_something_ends_counts_in_a_cut_text(end):
    assert find_last_number(f"5, no, 12{end}", is_cut_off=True) == "12"


def test_long_texts_take_linear_time():
    started = time.process_time()
    for part in ("1", "1,", "1,000", "9,99", "1.", "1/", ".1", "-", "= -", "1e", "\\frac{"):
        find_numbers(part * (20_000 // len(part)))
    assert time.process_time() - started < 2.0
    assert parse_value("1" * 10_000) is None
    assert parse_value("1e9999") is None
