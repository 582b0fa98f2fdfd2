"""Set-up of all tests: no network, a time limit for each test, a check for leaks at the end."""

from __future__ import annotations

import atexit
import gc
import os
import sys

import pytest

import rl.weights  # noqa: F401  (before any test module loads Monarch)
from tests.support.leaks import pytest_sessionfinish, pytest_sessionstart
from tests.support.sharing import pytest_xdist_make_scheduler

__all__ = [
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_xdist_make_scheduler",
    "pytest_sessionfinish",
    "pytest_sessionstart",
]

# Set before any import that reads them, and inherited by the actors. Several tests and actors share the cores:
# a compute thread that spins between two operations takes the time of another that has work.
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
    # Tests in this process are small: a second compute thread costs more than it gains, and on a busy machine
    # it waits for a core at every operation. Actors set their own number.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


TIME_LIMITS_S = {"slow": 1200, "medium": 300}
"""Time limits by marker for tests without one of their own; the default is in pyproject.toml."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout"):
            continue
        for marker, limit_s in TIME_LIMITS_S.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.timeout(limit_s))
                break
