"""Data inside a page, as an HTML parser and a browser see it."""

import json
import math

from rl.reporting.html.blocks import inline_json, packed, unpacked

EVIL = "</script><script>alert(1)</script><!-- & \u2028 \ud800 \x00"


def test_no_character_of_inline_json_means_anything_to_an_html_parser():
    text = inline_json({EVIL: [EVIL, 1.5, None]})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {EVIL: [EVIL, 1.5, None]}


def test_a_packed_block_is_base64_and_comes_back_as_it_was():
    value = {"reply": EVIL, "numbers": [1, 2.5, None]}
    block = packed(value)
    assert unpacked(block) == value
    assert set(block) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
    assert packed(value) == block  # no time in it


def test_a_number_that_json_lacks_is_the_text_that_a_runs_files_have():
    value = {"loss": [math.nan, 1.5], "of": ({"x": -math.inf},)}
    told = {"loss": ["nan", 1.5], "of": [{"x": "-inf"}]}
    assert json.loads(inline_json(value)) == told
    assert unpacked(packed(value)) == told
