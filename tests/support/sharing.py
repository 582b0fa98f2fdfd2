"""Which tests go to one process where several share them (`make test`): those that share engines and actors.

Other tests go by their files.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ONE_PROCESS = {
    **dict.fromkeys(("actors", "benchmarks", "docs", "weights"), "actors"),
    **dict.fromkeys(("chaos", "examples", "runs", "soak"), "runs"),
    "tinker/http": "tinker/http",
}
"""By the beginning of the path in tests/: a name of what is kept together, as it starts
engines and actors that are shared, or that would be too many at once."""


def kept_together(nodeid: str) -> str:
    """What is done in one process with this test: the same for all of it."""
    file = nodeid.partition("::")[0]
    place = file.removeprefix("tests/")
    for folder, name in ONE_PROCESS.items():
        if f"{place}/".startswith(f"{folder}/"):
            return name
    return file


class Scheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return kept_together(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)
