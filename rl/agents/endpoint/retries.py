"""Requests that are repeated, and the replies that they share.

Clients repeat a request after a timeout or a lost connection. They get the reply of the first one,
also while that is still being sampled. Clients that count their tries may make equal requests at
the same time: these are samples of their own, and a retry gets one whose client has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from rl.agents.endpoint.answering import Answer
from rl.agents.types import RequestError

IDEMPOTENCY_KEY = "Idempotency-Key"
"""Header by which a client names its request."""
MAX_GIVEN = 3
"""Times that an answer is given to clients that do not say whether they retry."""
MAX_ANSWERS = 64
"""Answers of an episode that are kept for retries, unless more are under way."""
GRACE_S = 5.0
"""Time after a disconnection in which a client may ask again before its reply is cancelled. Clients
that retry wait up to a few seconds before they do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestIdentity:
    """What tells a repeated request from another one."""

    digest: bytes
    """Digest of path and body, or of the key by which the client names its request."""
    body: bytes | None = None
    """Digest of the body of a request with a name; None: it has none."""
    is_first_try: bool | None = None
    """True or False if the client says so; None if it does not."""


@dataclass(kw_only=True, eq=False)
class SharedReply:
    """A reply that is being sampled, or is there."""

    identity: RequestIdentity
    """That of its first request."""
    task: asyncio.Task[Answer]
    num_waiting: int = 0
    num_given: int = 0
    """Times that the whole answer was sent."""
    _expiry: asyncio.TimerHandle | None = None
    """Timer that cancels the reply, while no client waits for it."""

    @property
    def is_delivered(self) -> bool:
        return self.num_given > 0

    @property
    def has_failed(self) -> bool:
        """True if there will be no answer."""
        task = self.task
        if not task.done():
            return task.cancelling() > 0
        return task.cancelled() or task.exception() is not None

    def add_waiter(self) -> None:
        """Note a client that waits: the reply is not cancelled while there is one."""
        self.num_waiting += 1
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def remove_waiter(self) -> None:
        """Note that a client waits no more; without any the reply is cancelled after a while."""
        self.num_waiting -= 1
        if not (self.num_waiting or self.task.done()):
            self._expiry = asyncio.get_running_loop().call_later(GRACE_S, self.task.cancel)

    def may_repeat(self, identity: RequestIdentity) -> bool:
        """Return whether a request with this identity may get the reply."""
        if identity.digest != self.identity.digest or self.has_failed:
            return False
        if identity.body is not None:
            return True
        if identity.is_first_try:
            # The client says that it asks anew: it wants another sample, unless it has given up the
            # request before, as frameworks do that retry around a client.
            return not (self.is_delivered or self.num_waiting)
        # One that does not count its tries may want another sample too, such as after a bad reply.
        return identity.is_first_try is False or self.num_given < MAX_GIVEN


class SharedReplies:
    """The replies of an episode, for as long as they may be asked for again."""

    def __init__(self) -> None:
        self._replies: list[SharedReply] = []
        """In the order of their first requests."""

    def __len__(self) -> int:
        return len(self._replies)

    def find(self, identity: RequestIdentity) -> SharedReply | None:
        """Return the reply that a request gets because it repeats another; None if it does not.

        Raises RequestError for another request with the name of an earlier one.
        """
        found = [reply for reply in self._replies if reply.may_repeat(identity)]
        if not found:
            return None
        if identity.body != found[0].identity.body:
            # The status of the IETF's draft on this header; clients do not repeat the request.
            raise RequestError(
                f"{IDEMPOTENCY_KEY} names an earlier request with another body: send a new key, or "
                "the same body",
                status=422,
                code="idempotency_key_reused",
            )
        # Of equal requests a client that has gone repeats its own. The server may not know yet that
        # it has: then the last one that has fewest clients is as good as any.
        return min(reversed(found), key=lambda reply: (reply.is_delivered, reply.num_waiting))

    def start(
        self, answer: Coroutine[Any, Any, Answer], *, identity: RequestIdentity
    ) -> SharedReply:
        """Begin the reply to a request that repeats no other."""
        reply = SharedReply(identity=identity, task=asyncio.create_task(answer))
        self._replies.append(reply)
        reply.task.add_done_callback(partial(self._forget_failure, reply))
        self._forget_oldest()
        return reply

    def find_answered(self, answer: Answer) -> SharedReply | None:
        """Return the reply with an answer; None if it is forgotten."""
        for reply in reversed(self._replies):
            if reply.task.done() and not reply.has_failed and reply.task.result() is answer:
                return reply
        return None

    def cancel(self) -> None:
        """Cancel the replies that are under way."""
        for reply in self._replies:
            reply.task.cancel()

    def _forget_failure(self, reply: SharedReply, task: asyncio.Task[Answer]) -> None:
        """Forget a request without an answer: asked again, it is another one."""
        # Reading the error tells asyncio that somebody knows of it.
        if reply.has_failed and reply in self._replies:
            self._replies.remove(reply)

    def _forget_oldest(self) -> None:
        """Forget the oldest answers that were given: retries come soon."""
        while len(self._replies) > MAX_ANSWERS:
            oldest = next((reply for reply in self._replies if reply.is_delivered), None)
            if oldest is None:
                return
            self._replies.remove(oldest)


def read_error(future: asyncio.Future[Any]) -> None:
    """Read the error of a future: asyncio would log it if the client that waits has gone."""
    if not future.cancelled():
        future.exception()
