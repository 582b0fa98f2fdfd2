"""The types of the official client, under the name that code moved from it asks for.

Clients, service and backends speak to each other in `rl.tinker.messages`, which has no other packages' types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker.types import *  # noqa: F403

if TYPE_CHECKING:  # mypy does not follow the official package

    def __getattr__(name: str) -> Any: ...
