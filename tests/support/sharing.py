"""Grouping of tests for pytest-xdist: tests that share engines and actors run in one process.

Other tests go by their files.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ONE_PROCESS = ("actors", "weights", "tinker")
"""Folders of tests whose files share engines and actors, or would start too many at once."""


def kept_together(nodeid: str) -> str:
    """Return the name of the group that the test runs in."""
    file = nodeid.partition("::")[0]
    folder = file.removeprefix("tests/").partition("/")[0]
    return folder if folder in ONE_PROCESS else file


class Scheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return kept_together(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)
