"""The page as a file: it is self-contained, and its policy forbids foreign scripts."""

import base64
import hashlib
import json
import math
import re

import pytest

from rl.reporting.html import page
from rl.reporting.html.page import embed_json
from rl.reporting.html.rollouts import pack
from tests.support.report_runs import unpack

EVIL = "</script><script>alert(1)</script>"
SCRIPT = re.compile(r"<script([^>]*)>(.*?)</script>", re.DOTALL)


@pytest.fixture(scope="module")
def text():
    return page.render(title=EVIL, report={"name": EVIL}, blocks=[("chunk-0", pack([EVIL]))])


def own_scripts(text):
    return [script for attributes, script in SCRIPT.findall(text) if "type=" not in attributes]


def test_page_loads_nothing(text):
    links = re.findall(r'\b(?:src|href)="?([^"\s>]*)', SCRIPT.sub("", text))
    assert links
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not any("src=" in attributes for attributes, _ in SCRIPT.findall(text))


def test_policy_allows_only_the_scripts_of_the_page(text):
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy"\s+content="([^"]*)"', text)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    run = own_scripts(text)
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in run
    ]
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == hashes
    assert len(run) == 12


def test_text_of_a_run_is_escaped(text):
    ids = dict(re.findall(r'<script[^>]* id="([^"]*)">(.*?)</script>', text, re.DOTALL))
    assert "alert" not in "".join(own_scripts(text))
    assert "<" not in ids["report"]
    assert unpack(ids["chunk-0"]) == [EVIL]


def test_packed_block_is_base64_and_unpacks_to_its_value():
    value = {"reply": f"{EVIL}<!-- & \u2028 \ud800 \x00", "numbers": [1, 2.5, None]}
    block = pack(value)
    assert unpack(block) == value
    assert set(block) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
    assert pack(value) == block  # no timestamp in it


def test_numbers_that_are_not_finite_become_strings():
    value = {"loss": [math.nan, 1.5], "of": ({"x": -math.inf},)}
    told = {"loss": ["nan", 1.5], "of": [{"x": "-inf"}]}
    assert json.loads(embed_json(value)) == told
    assert unpack(pack(value)) == told
