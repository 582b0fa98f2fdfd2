"""What the clients of one ServiceClient have in common."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from rl.tinker.client.host import Host
from rl.tinker.client.hosts import release
from rl.tinker.service.service import LOCAL_OWNER


class Session:
    """A session of the service. It ends, and its models leave the memory, when it is closed or when nobody
    has a client of it any more: a cell of a notebook may be run again and again."""

    def __init__(
        self, host: Host, *, user_metadata: Mapping[str, str] | None, display_name: str | None
    ) -> None:
        self.host = host
        self.session_id: str = host.call(
            lambda: host.service.sessions.create(
                owner=LOCAL_OWNER, user_metadata=user_metadata, display_name=display_name
            ),
            title="create a session",
        )
        self.model_seq_ids = itertools.count()
        self.sampler_seq_ids = itertools.count()
        self._end = weakref.finalize(self, _end, host, self.session_id)
        self._end.atexit = False  # hosts end there as a whole

    def close(self) -> None:
        """Blocks until the backend has ended, if nobody else uses it. Idempotent."""
        self._end.detach()
        _finish(self.host, self.session_id)
        release(self.host)


def _finish(host: Host, session_id: str) -> None:
    host.post(functools.partial(_finish_in_loop, host.service, session_id))


def _finish_in_loop(service: Any, session_id: str) -> None:
    service.sessions.finish(session_id, owner=LOCAL_OWNER)


def _end(host: Host, session_id: str) -> None:
    """Anywhere, as the garbage collector calls it: nothing here waits."""
    _finish(host, session_id)
    with contextlib.suppress(RuntimeError):  # The interpreter is ending, and hosts with it.
        threading.Thread(target=release, args=(host,), name="tinker-release", daemon=True).start()
