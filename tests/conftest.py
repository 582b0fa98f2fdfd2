"""Set-up of all tests: no network, a time limit for each test, a check for leaks at the end, and
groups for pytest-xdist."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections import Counter
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

import rl.weights  # noqa: F401  (before any test module loads Monarch)
from tests.support.leaks import pytest_sessionfinish, pytest_sessionstart

__all__ = ["pytest_sessionfinish", "pytest_sessionstart"]

# Set before any import that reads them, and inherited by the actors. Several tests and actors share
# the cores: a compute thread that spins between two operations takes the time of another that has
# work.
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
    OMP_WAIT_POLICY="passive",
)


def pytest_configure() -> None:
    # Modules imported by tests create many objects and no garbage: see `rl.utils.processes`.
    gc.disable()


def pytest_collection_finish() -> None:
    # Tests in this process are small: a second compute thread costs more than it gains, and on a
    # busy machine it waits for a core at every operation. Actors set their own number.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


TIME_LIMITS_S = {"slow": 1200, "rehearsal": 600, "medium": 300}
"""Time limits by marker for tests without one of their own; the default is in pyproject.toml."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout"):
            continue
        for marker, limit_s in TIME_LIMITS_S.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.timeout(limit_s))
                break
    # The longest scope first, as far as the limits tell: then all processes end at about the same
    # time.
    limits_s = Counter[str]()
    for item in items:
        limit = item.get_closest_marker("timeout")
        limits_s[scope_of(item.nodeid)] += 60 if limit is None else limit.args[0]
    items.sort(key=lambda item: -limits_s[scope_of(item.nodeid)])


ONE_PROCESS = ("actors", "weights", "tinker")
"""Folders of tests whose files share engines and actors, or would start too many at once."""


def scope_of(nodeid: str) -> str:
    """Return what goes to one process together: a file of tests, or a whole folder."""
    file = nodeid.partition("::")[0]
    folder = file.removeprefix("tests/").partition("/")[0]
    return folder if folder in ONE_PROCESS else file


class Scheduling(LoadScopeScheduling):
    """Tests go to processes by their scopes, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)
