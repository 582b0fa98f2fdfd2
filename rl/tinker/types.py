"""The types of the official client, under the name that code moved from it asks for.

Clients, service and backends speak to each other in `rl.tinker.messages`, which has no other packages' types.
"""

from __future__ import annotations

from tinker.types import *  # noqa: F403
