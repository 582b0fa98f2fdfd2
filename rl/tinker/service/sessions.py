"""Sessions, which a client opens and keeps alive, and which end with everything in them."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from fastapi import Body
from tinker import types as wire
from tinker.types.session_status import ClientSessionFinishReason

from rl.tinker.service.streams import ModelStream
from rl.tinker.types import SESSION, GoneError, Id, LimitReachedError, Limits, NotFoundError, Owner
from rl.tinker.wire.codec import CreateSessionBody

MAX_SESSIONS = 100
"""Sessions of one key that have not ended."""
KEPT = 1000
"""Sampling sessions, and models that have ended, which a session remembers; sessions that have
ended, of one owner.
"""


@dataclass(slots=True, eq=False)
class Session:
    """Session of a client, which owns models and samplers."""

    session_id: str
    owner: str
    streams: dict[str, ModelStream] = field(default_factory=dict)
    """Models by id, also the last `KEPT` that have ended; none once the session and their tasks
    have.
    """
    ended: bool = False
    silence: asyncio.TimerHandle | None = None
    """Timer that ends the session unless another request about it comes before."""


class Sessions:
    """The sessions of all owners; each request about a session, its models, samplers or results
    keeps it alive.

    Raises:
        NotFoundError: from any call, for a session that is unknown, ended long ago or belongs to
            another owner.
        GoneError: from any call, for a session that has ended.
    """

    def __init__(self, *, limits: Limits) -> None:
        self._process = secrets.token_hex(4)
        """First part of all ids, which tells those of an earlier process of the server."""
        self._limits = limits
        self._sessions: dict[str, Session] = {}
        """Sessions of this process, oldest first; those that have ended as long as their results
        may be kept.
        """
        self.end_samplers: Callable[[Session, str], None] = lambda session, why: None
        """Callback that gets an ended session and the reason."""

    async def create_session(
        self, body: CreateSessionBody, *, owner: Owner
    ) -> wire.CreateSessionResponse:
        """Open a session, which lives until it is finished or silent for too long."""
        sessions = [one for one in self._sessions.values() if one.owner == owner]
        # A session whose models still end holds memory, so it counts as one that has not ended.
        ended = [one for one in sessions if one.ended and not one.streams]
        if len(sessions) - len(ended) >= MAX_SESSIONS:
            raise LimitReachedError(
                f"this key has {MAX_SESSIONS} sessions that have not ended; finish one of them"
            )
        for one in ended[:-KEPT]:
            del self._sessions[one.session_id]
        session_id = f"{self._process}-{secrets.token_hex(8)}"
        session = Session(session_id, owner)
        self._sessions[session_id] = session
        self._restart_timer(session)
        return wire.CreateSessionResponse(session_id=session_id)

    async def session_heartbeat(
        self, body: wire.SessionHeartbeatRequest, *, owner: Owner
    ) -> wire.SessionHeartbeatResponse:
        """Keep a session alive; the official client calls this every ten seconds."""
        self.find_live(body.session_id, owner)
        return wire.SessionHeartbeatResponse()

    async def finish(
        self,
        session_id: Id,
        *,
        reason: Annotated[ClientSessionFinishReason, Body()],
        detail: Annotated[str | None, Body()] = None,
        owner: Owner,
    ) -> None:
        """End a session: waiting requests fail, models and samplers close, checkpoints stay.
        Idempotent.
        """
        self._end(self._find(session_id, owner), f"session {session_id} was finished")

    # For the other calls

    def find_live(self, any_id: str, owner: str) -> Session:
        """Return the session of a model's, sampler's, request's or its own id, and keep it
        alive.
        """
        session = self._find(any_id, owner)
        if session.ended:
            raise GoneError(
                f"session {session.session_id} has ended: it was finished, or sent no heartbeat "
                "for too long"
            )
        self._restart_timer(session)
        return session

    def keep_alive(self, any_id: str, owner: str) -> None:
        """Keep a session alive unless it has ended."""
        session = self._find(any_id, owner)
        if not session.ended:
            self._restart_timer(session)

    def list_streams(self, owner: str) -> dict[str, ModelStream]:
        """Return an owner's models in memory by id, oldest first."""
        streams = self.list_all_streams()
        return {stream.model_id: stream for stream in streams if stream.owner == owner}

    def list_all_streams(self) -> list[ModelStream]:
        """Return the models of all owners that are in memory, oldest first."""
        streams = []
        for session in self._sessions.values():
            streams += [stream for stream in session.streams.values() if stream.in_memory]
        return streams

    def close(self) -> None:
        """End all sessions."""
        for session in tuple(self._sessions.values()):
            self._end(session, "the service is closing")

    def _find(self, any_id: str, owner: str) -> Session:
        """Return the session that a session's, model's, sampler's or request's id begins with."""
        session_id = any_id.partition(":")[0]
        session = self._sessions.get(session_id)
        if session is not None and session.owner == owner:
            return session
        # Another owner's session is not found, as one that never was: ids reveal nothing.
        if re.fullmatch(SESSION, session_id) and not session_id.startswith(self._process):
            raise GoneError(
                f"{any_id!r:.100} ended with the server process that created it; its checkpoints "
                "are still there"
            )
        raise NotFoundError(f"there is no {any_id!r:.100}")

    def _restart_timer(self, session: Session) -> None:
        timeout_s = self._limits.session_timeout_s
        if timeout_s is not None:
            if session.silence is not None:
                session.silence.cancel()
            why = f"session {session.session_id} sent no heartbeat for {timeout_s:g} s"
            session.silence = asyncio.get_running_loop().call_later(
                timeout_s, self._end, session, why
            )

    def _end(self, session: Session, why: str) -> None:
        if session.ended:
            return
        session.ended = True
        if session.silence is not None:
            session.silence.cancel()
        for stream in session.streams.values():
            stream.end(why)
            # The model frees its memory at the end of its task, and is listed until then.
            stream.task.add_done_callback(partial(_forget_stream, session, stream.model_id))
        self.end_samplers(session, why)
        # Until then a client that polls is told that its session has ended, not that there is none.
        drop = partial(self._sessions.pop, session.session_id, None)
        asyncio.get_running_loop().call_later(self._limits.result_kept_s, drop)


def _forget_stream(session: Session, model_id: str, _: asyncio.Task[None]) -> None:
    del session.streams[model_id]
