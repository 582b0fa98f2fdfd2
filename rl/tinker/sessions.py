"""Sessions: the unit that a client opens and keeps alive, and that ends with everything in it."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from rl.tinker.types import (
    SESSION,
    GoneError,
    LimitReachedError,
    Limits,
    Metadata,
    NotFoundError,
    check_metadata,
)


@dataclass(slots=True, eq=False)
class Session:
    session_id: str
    owner: str
    display_name: str | None
    user_metadata: Metadata | None
    model_ids: list[str] = field(default_factory=list)
    sampling_session_ids: list[str] = field(default_factory=list)
    silence: asyncio.TimerHandle | None = None
    """Timer that ends the session unless another request about it comes before."""


class Sessions:
    """The sessions of all owners; each request about a session, its models, samplers or results keeps it alive.

    Raises:
        NotFoundError: from any method, for a session that is unknown or belongs to another owner.
        GoneError: from any method, for a session that has ended.
    """

    def __init__(self, *, limits: Limits) -> None:
        self._process = secrets.token_hex(4)
        """First part of all ids, by which ids of an earlier process of the server are recognised."""
        self._limits = limits
        self._sessions: dict[str, Session] = {}
        self._owners: dict[str, str] = {}
        """Owner of each session of this process, also of those that have ended."""
        self.on_end: list[Callable[[Session, str], None]] = []
        """Callbacks that get an ended session and the reason."""

    def create(
        self, *, owner: str, user_metadata: Metadata | None = None, display_name: str | None = None
    ) -> str:
        """Open a session and return its id.

        Raises:
            LimitReachedError: `limits.sessions` is reached.
            InvalidRequestError: a value of the metadata is no text.
        """
        check_metadata(user_metadata)
        if len(self._of(owner)) >= self._limits.sessions:
            raise LimitReachedError(
                f"limit sessions: {self._limits.sessions} have not ended; finish one, or wait until one times out"
            )
        session = Session(
            session_id=f"{self._process}-{secrets.token_hex(8)}",
            owner=owner,
            display_name=display_name,
            user_metadata=user_metadata,
        )
        self._sessions[session.session_id] = session
        self._owners[session.session_id] = owner
        self._keep_alive(session)
        return session.session_id

    def ids(self, *, owner: str) -> list[str]:
        """Return the ids of an owner's sessions that have not ended, newest first."""
        return [session.session_id for session in reversed(self._of(owner))]

    def finish(self, session_id: str, *, owner: str) -> None:
        """End a session in the background: its models and samplers close and waiting requests fail.

        Checkpoints stay. Without effect on a session that has ended.
        """
        if (session := self._sessions.get(self._id_of(session_id, owner))) is not None:
            self._end(session, f"session {session_id} was finished")

    def live(self, any_id: str, owner: str) -> Session:
        """Return the session of a model's, sampler's, request's or its own id, and keep it alive."""
        session_id = self._id_of(any_id, owner)
        if (session := self._sessions.get(session_id)) is None:
            raise GoneError(
                f"session {session_id} has ended: it was finished, or sent no heartbeat for too long"
            )
        self._keep_alive(session)
        return session

    def touch(self, any_id: str, owner: str) -> None:
        """Keep a session alive if it has not ended."""
        session = self._sessions.get(self._id_of(any_id, owner))
        if session is not None:
            self._keep_alive(session)

    def is_live(self, session: Session) -> bool:
        return session.session_id in self._sessions

    def close(self) -> None:
        """End all sessions."""
        for session in tuple(self._sessions.values()):
            self._end(session, "the service is closing")

    def _id_of(self, any_id: str, owner: str) -> str:
        """Return the session that a session's, model's, sampler's or request's id begins with."""
        session_id = any_id.partition(":")[0]
        if self._owners.get(session_id) == owner:
            return session_id
        if re.fullmatch(SESSION, session_id) and not session_id.startswith(self._process):
            raise GoneError(
                f"{any_id!r:.100} ended with the server process that created it; its checkpoints are still there"
            )
        raise NotFoundError(f"there is no {any_id!r:.100}")

    def _of(self, owner: str) -> list[Session]:
        return [session for session in self._sessions.values() if session.owner == owner]

    def _keep_alive(self, session: Session) -> None:
        if (timeout_s := self._limits.session_timeout_s) is not None:
            if session.silence is not None:
                session.silence.cancel()
            why = f"session {session.session_id} sent no heartbeat for {timeout_s:g} s"
            session.silence = asyncio.get_running_loop().call_later(timeout_s, self._end, session, why)

    def _end(self, session: Session, why: str) -> None:
        del self._sessions[session.session_id]
        if session.silence is not None:
            session.silence.cancel()
        for end in self.on_end:
            end(session, why)
