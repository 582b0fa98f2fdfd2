"""Private names of verifiers 0.4 that relay needs, each with its reason.

`rl.tasks.verifiers_task` refuses other versions, because these names may change with any of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def lend_client(env: Any, client: Any, *, config: Any) -> Iterator[None]:
    """Let an environment's server send the requests of a config through the HTTP of a client.

    The URL of an episode is another for each. verifiers would make an HTTP client for each URL, of
    0.8 MiB and 40 ms of processor time, and keep them all until its server ends.
    """
    lent = copy.copy(client)
    lent.base_url = config.base_url
    clients = env._interception.clients
    name = config.model_dump_json()
    clients[name] = lent
    try:
        yield
    finally:
        del clients[name]
