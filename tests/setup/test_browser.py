"""Search for the browser of `make test-report`."""

import sys
from pathlib import Path

import pytest

from tools.browser import NoBrowserError, find_browser


def test_named_browser_is_preferred_and_errors_say_what_to_do(tmp_path):
    found = find_browser(variables={"RELAY_BROWSER": sys.executable}, which=lambda name: f"/usr/bin/{name}")
    assert found == Path(sys.executable)
    with pytest.raises(NoBrowserError, match=rf"RELAY_BROWSER={tmp_path}/x: there is no program"):
        find_browser(variables={"RELAY_BROWSER": str(tmp_path / "x")})
    with pytest.raises(NoBrowserError, match="apt-get install chromium"):
        find_browser(variables={}, which=lambda name: None)
