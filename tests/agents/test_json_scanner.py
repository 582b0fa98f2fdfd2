"""The end of a JSON value, found while its text arrives: the same as that of the decoder."""

import json
import random

import pytest

from rl.agents.dialects.json_scanner import JsonScanner
from rl.rollouts.replies import decode_json

ALPHABET = ['"', "\\", "{", "}", "[", "]", ":", ",", "1", "-", ".", "e", "tr", "ue", "null", " "]
ALPHABET += ["\\u00", "41", "\n", "é", '"a":', '{"a":', "x", "0"]


def scan_in_pieces(text, rng):
    scanner, place = JsonScanner(start=0), 0
    while place < len(text):
        place += rng.choice((1, 2, 3, 9))
        scanner.scan(text[:place])
    scanner.scan(text, is_last=True)
    return scanner.state, scanner.position


@pytest.mark.parametrize(
    ("text", "state", "position"),
    [
        ('{"a": [1, {"b": "}"}]} x', "done", 22),
        ('{"a": "\\u00e9\\"}"}', "done", 18),
        ("[]", "done", 2),
        ("[1,]", "broken", 3),
        ("{'a': 1}", "broken", 1),
        ('{"a" 1}', "broken", 5),
        ('{"a": 01}', "broken", 6),
        ('{"a": NaN}', "broken", 6),
        ('{"a": "line\nend"}', "broken", 11),
        ('{"a": "\\x"}', "broken", 7),
        ('{"a": ]', "broken", 6),
        ('["a"}', "broken", 4),
        ('{"a": tr', "open", 6),
        ('{"a": "\\u00', "open", 7),
        ('{"a": 1', "open", 6),
        ("", "open", 0),
    ],
)
def test_value_ends_breaks_or_stays_open(text, state, position):
    scanner = JsonScanner(start=0)
    assert (scanner.scan(text), scanner.position) == (state, position)


def test_scanner_agrees_with_the_decoder_however_the_text_is_cut():
    rng = random.Random(0)
    num_done = 0
    for _ in range(4000):
        text = rng.choice(["{", "[", ""]) + "".join(rng.choices(ALPHABET, k=rng.randint(0, 8)))
        state, position = scan_in_pieces(text, rng)
        _, end, problem = decode_json(text, 0)
        # The decoder reads `12x` as a number and a rest, and no white space before a value.
        if not text.startswith(("{", "[")):
            continue
        assert (state == "done") == (not problem), text
        if state == "done":
            num_done += 1
            assert position == end, text
    assert num_done > 100


def test_value_is_nested_at_most_64_levels():
    for depth, said in ((64, ""), (65, "is nested deeper than 64 levels"), (10**5, "is not valid")):
        _, _, problem = decode_json("[" * depth + "]" * depth, 0)
        assert problem.startswith(said)
        assert bool(problem) == bool(said)


def test_text_that_could_be_completed_is_never_broken():
    rng = random.Random(1)
    for _ in range(300):
        value = {"a": [rng.random(), None, {"é\n": '"\\'}], "b": [[], {}, True, -3, 1e-9]}
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
        for place in range(len(text)):
            assert JsonScanner(start=0).scan(text[:place]) == "open"
        assert JsonScanner(start=0).scan(text) == "done"
