"""The page as a file: it holds what it needs, and lets run nothing else."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rl.reporting.html import page
from rl.reporting.html.blocks import packed, unpacked

EVIL = "</script><script>alert(1)</script>"


class Reader(HTMLParser):
    """Elements with their attributes, and the texts of scripts."""

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
    text = page.render(title=EVIL, report={"name": EVIL}, blocks=[("chunk-0", packed([EVIL]))])
    reader = Reader()
    reader.feed(text)
    return reader


def test_nothing_is_loaded_from_anywhere(read):
    links = [attrs[name] for _, attrs in read.elements for name in ("src", "href") if name in attrs]
    assert links
    assert all(link.startswith(("#", "data:")) for link in links)


def test_the_pages_policy_names_every_script_of_it_and_allows_no_other_source(read):
    (policy,) = [a["content"] for t, a in read.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    run = [text for attrs, text in read.scripts if "type" not in attrs]
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in run]
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == hashes
    assert len(run) == 12


def test_a_runs_text_makes_no_element(read):
    ids = {attrs["id"]: text for attrs, text in read.scripts if "id" in attrs}
    assert "alert" not in "".join(text for attrs, text in read.scripts if "type" not in attrs)
    assert "<" not in ids["report"]
    assert unpacked(ids["chunk-0"]) == [EVIL]


def test_each_section_has_its_place_and_is_begun_by_the_page(read):
    sections = [attrs["id"] for tag, attrs in read.elements if tag == "section"]
    assert sections == [name for name, _ in page.SECTIONS]
    script = Path(page.__file__).with_name("static").joinpath("main.js").read_text()
    begun = re.findall(r'"(\w+)"', "".join(re.findall(r"const (?:AT_ONCE|WHEN_NEAR) = (\[.*?\]);", script)))
    assert begun == sections


def test_the_chart_library_is_the_version_that_is_documented():
    vendored = Path(page.__file__).with_name("vendor") / "uPlot.iife.min.js"
    (version,) = re.findall(r"uPlot \(v([\d.]+)\)", vendored.read_text(encoding="utf-8")[:200])
    docs = (Path(__file__).parents[3] / "docs" / "report.md").read_text()
    assert f"uPlot {version}" in docs
