"""Search for the browser of `make test-report`."""

import sys
from pathlib import Path

import pytest

from tools.browser import NoBrowserError, find_browser


def test_named_browser_is_preferred_to_those_on_path():
    found = find_browser(variables={"RELAY_BROWSER": sys.executable}, which=lambda name: f"/usr/bin/{name}")
    assert found == Path(sys.executable)


def test_missing_named_browser_is_refused(tmp_path):
    with pytest.raises(NoBrowserError, match=rf"RELAY_BROWSER={tmp_path}/x: there is no program"):
        find_browser(variables={"RELAY_BROWSER": str(tmp_path / "x")})


def test_error_without_a_browser_says_what_to_install():
    with pytest.raises(NoBrowserError, match="apt-get install chromium"):
        find_browser(variables={}, which=lambda name: None)
