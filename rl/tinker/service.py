"""The Tinker service: sessions, models' ordered streams, results, samplers and storage. No transport.

    client.py, http/   ->   Service   ->   Backend (this process or actors)
    sessions                 who is there, and what ends with them
    training                 requests of models in training, in their order (streams.py)
    sampling                 sampling sessions (samplers.py holds what they sample from)
    catalogue                what can be asked about models, runs and checkpoints (storage.py)
    retrieve, cancel         results of what was submitted (futures.py)

Everything runs in one event loop. What submits work is a plain function: it checks, queues and returns at once;
what was wrong with the call is raised as one of errors.py, what goes wrong afterwards is a `Failure` from
`retrieve`. Every call names its owner, and what belongs to another owner is not found.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rl.tinker.backend import Backend
from rl.tinker.catalogue import Catalogue
from rl.tinker.limits import Limits
from rl.tinker.responses import Failure, Response
from rl.tinker.sampling import SamplingSessions
from rl.tinker.sessions import Sessions
from rl.tinker.training import Training

LOCAL_OWNER = "local"
"""Of everything that is asked for in this process."""


class Service:
    """Build it anywhere; `start`, and every call after it, in one event loop.

    `wall_time_s` is the time that checkpoints are stamped with and expire by.
    """

    sessions: Sessions
    training: Training
    sampling: SamplingSessions
    catalogue: Catalogue
    limits: Limits

    def __init__(
        self,
        *,
        backend: Backend,
        storage_folder: str | Path,
        limits: Limits | None = None,
        wall_time_s: Callable[[], float] = time.time,
    ) -> None: ...

    async def start(self) -> None:
        """Start the backend, and remove what has expired or was left half written.

        Raises:
            ValueError: the storage folder cannot be written.
        """
        ...

    async def close(self) -> None:
        """End all sessions, then the backend, within twice `limits.close_timeout_s`. Idempotent.

        Whoever waits for a result gets a GoneError at once.
        """
        ...

    async def retrieve(self, request_id: str, *, owner: str, wait_s: float) -> Response | Failure | None:
        """The result; None when there is none yet after `wait_s`. May be called again, and several times at once.

        Raises:
            NotFoundError: it was never given to this owner.
            GoneError: it is no longer kept, or of an earlier process of the server.
        """
        ...

    def cancel(self, request_id: str, *, owner: str) -> None:
        """End a sample's work; its result becomes a Failure. Without effect when it has ended.

        Raises:
            InvalidRequestError: it is not a sample.
            NotFoundError, GoneError: as `retrieve`.
        """
        ...
