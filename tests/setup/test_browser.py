"""Where the browser of `make test-report` comes from."""

import sys
from pathlib import Path

import pytest

from tools.browser import NoBrowserError, find_browser


def test_the_one_that_is_named_is_taken_before_those_on_path():
    found = find_browser(variables={"RELAY_BROWSER": sys.executable}, which=lambda name: f"/usr/bin/{name}")
    assert found == Path(sys.executable)


def test_the_first_of_the_known_names_on_path_is_taken():
    on_path = {"google-chrome": "/opt/chrome", "chromium-browser": "/snap/chromium"}
    assert find_browser(variables={}, which=on_path.get) == Path("/snap/chromium")


def test_a_named_one_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(NoBrowserError, match=rf"RELAY_BROWSER={tmp_path}/x: there is no program"):
        find_browser(variables={"RELAY_BROWSER": str(tmp_path / "x")})


def test_without_any_it_is_said_what_to_install():
    with pytest.raises(NoBrowserError, match="apt-get install chromium"):
        find_browser(variables={}, which=lambda name: None)
