"""Futures of clients, which code written for older releases of the official client uses as the clients."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from rl.tinker.client.futures import ClientFuture

C = TypeVar("C")


class FutureOfClient(ClientFuture[C]):
    def __init__(self, future: ClientFuture[C]) -> None:
        super().__init__(future.future())

    def __getattr__(self, name: str) -> Any:
        """The client's, which is waited for."""
        if name.startswith("_"):
            raise AttributeError(name)
        warnings.warn(
            f"using the future of a client as the client (.{name}) is deprecated, as in the official "
            "package: await it, or call .result()",
            FutureWarning,
            stacklevel=2,
        )
        return getattr(self.result(), name)
