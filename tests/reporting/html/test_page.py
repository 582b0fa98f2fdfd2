"""The page as a file: it is self-contained, and its policy forbids foreign scripts."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rl.reporting.html import page
from rl.reporting.html.page import inline_json
from rl.reporting.html.rollouts import pack, unpack

EVIL = "</script><script>alert(1)</script>"


class Reader(HTMLParser):
    """Parser that collects elements with their attributes, and the texts of scripts."""

    def __init__(self):
        super().__init__()
        self.elements = []
        self.scripts = []
        self._in_script = False

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, data):
        if self._in_script:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)


@pytest.fixture(scope="module")
def read():
    text = page.render(title=EVIL, report={"name": EVIL}, blocks=[("chunk-0", pack([EVIL]))])
    reader = Reader()
    reader.feed(text)
    return reader


def test_page_loads_nothing(read):
    links = [attrs[name] for _, attrs in read.elements for name in ("src", "href") if name in attrs]
    assert links
    assert all(link.startswith(("#", "data:")) for link in links)


def test_policy_allows_only_the_scripts_of_the_page(read):
    (policy,) = [a["content"] for t, a in read.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    run = [text for attrs, text in read.scripts if "type" not in attrs]
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in run]
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == hashes
    assert len(run) == 12


def test_text_of_a_run_is_escaped(read):
    ids = {attrs["id"]: text for attrs, text in read.scripts if "id" in attrs}
    assert "alert" not in "".join(text for attrs, text in read.scripts if "type" not in attrs)
    assert "<" not in ids["report"]
    assert unpack(ids["chunk-0"]) == [EVIL]


def test_each_section_is_in_the_page(read):
    sections = [attrs["id"] for tag, attrs in read.elements if tag == "section"]
    assert sections == [name for name, _ in page.SECTIONS]
    script = Path(page.__file__).with_name("static").joinpath("main.js").read_text()
    begun = re.findall(r'"(\w+)"', "".join(re.findall(r"const (?:AT_ONCE|WHEN_NEAR) = (\[.*?\]);", script)))
    assert begun == sections


HOSTILE = "</script><script>alert(1)</script><!-- & \u2028 \ud800 \x00"


def test_packed_block_is_base64_and_unpacks_to_its_value():
    value = {"reply": HOSTILE, "numbers": [1, 2.5, None]}
    block = pack(value)
    assert unpack(block) == value
    assert set(block) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
    assert pack(value) == block  # no timestamp in it


def test_numbers_that_are_not_finite_become_strings():
    value = {"loss": [math.nan, 1.5], "of": ({"x": -math.inf},)}
    told = {"loss": ["nan", 1.5], "of": [{"x": "-inf"}]}
    assert json.loads(inline_json(value)) == told
    assert unpack(pack(value)) == told
