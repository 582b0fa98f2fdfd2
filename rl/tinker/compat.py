"""Uses of tinker 0.38 and of Python 3.11 and 3.12 beyond their documented interfaces, each with its
reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tinker import _base_client

from rl.utils.proxies import leads_here


class _DirectClient(_base_client.AsyncHttpxClientWrapper):
    """The official client's HTTP client, which reads no proxy for a server on this machine.

    NO_PROXY does not suffice: httpx refuses a SOCKS proxy without a package for it, whatever is
    exempted. The official client takes no HTTP client from its caller.
    """

    def __init__(self, **options: Any) -> None:
        if leads_here(str(options.get("base_url", ""))):
            options["trust_env"] = False
        super().__init__(**options)


def keep_clients_direct() -> None:
    """Let the official clients of this process reach servers on this machine without a proxy.
    Idempotent.
    """
    _base_client.AsyncHttpxClientWrapper = _DirectClient


def call_before_threads_end(function: Callable[[], object]) -> None:
    """Call a function at the end of the interpreter, before it stops its thread pools.

    `atexit` comes after that, when `asyncio.to_thread` cannot be used any more.
    """
    threading._register_atexit(function)  # type: ignore[attr-defined]
