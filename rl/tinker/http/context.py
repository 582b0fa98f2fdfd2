"""What the routes share: the service, the settings of the transport, and who asks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from rl.tinker.http.guard import owner_of
from rl.tinker.service.service import Service


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """What one request may take. Those on the work itself are the service's."""

    body_bytes: int = 64 * 2**20
    json_bytes: int = 8 * 2**20
    """Of a body that is JSON: all but those of `forward_backward`."""
    held_bytes: int = 2**30
    """Of all bodies that are being read or worked on."""
    body_timeout_s: float = 60.0
    values_per_request: int = 32 * 2**20
    """Numbers in the tensors of a `forward_backward`, once the sparse ones are dense."""
    chunk_data: int = 1024
    """Data that the client shall send in one request; it cuts larger batches into several."""
    chunk_bytes: int = 5_000_000
    """As `chunk_data`, of bytes."""
    poll_s: float = 25.0
    """A result is waited for so long in one request; the client asks again at once, and gives up on a single
    request after 45 s."""
    inline_bytes: int = 2**20
    """The client is told the size of larger results first, if it asks for that."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"{name}={value!r}: must be above 0")
        if self.poll_s > 40.0:
            raise ValueError(f"poll_s={self.poll_s:g}: must be at most 40, the client's limit is 45")


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    service: Service
    limits: HttpLimits
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """The server is about to end: nobody shall wait any longer."""


def _context(request: Request) -> Context:
    return request.app.state.context


ContextOf = Annotated[Context, Depends(_context)]
Owner = Annotated[str, Depends(owner_of)]
