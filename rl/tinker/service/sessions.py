"""Sessions: what a client holds, and what ends when it goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rl.tinker.errors import GoneError, InvalidRequestError, LimitReachedError
from rl.tinker.service.limits import Limits
from rl.tinker.service.names import Ids
from rl.tinker.service.responses import Metadata, Page, SessionInfo


@dataclass(slots=True, eq=False)
class Session:
    session_id: str
    owner: str
    created_s: float
    """Wall time."""
    heard_s: float
    """When somebody was last heard of, by the loop's clock."""
    tags: tuple[str, ...]
    display_name: str | None
    user_metadata: Metadata | None
    model_ids: list[str] = field(default_factory=list)
    sampling_session_ids: list[str] = field(default_factory=list)
    silence: asyncio.TimerHandle | None = None


class Sessions:
    """All raise NotFoundError for another's or an unknown session, GoneError for one that has ended.

    Every call about a session, its models, its sampling sessions or their results tells that somebody is
    there.
    """

    def __init__(self, *, ids: Ids, limits: Limits, wall_time_s: Callable[[], float]) -> None:
        self._ids = ids
        self._limits = limits
        self._wall_time_s = wall_time_s
        self._sessions: dict[str, Session] = {}
        self._closed = False
        self.on_end: list[Callable[[Session, str], None]] = []
        """Called with a session that has ended, and why."""

    def create(
        self,
        *,
        owner: str,
        tags: Sequence[str] = (),
        user_metadata: Metadata | None = None,
        display_name: str | None = None,
    ) -> str:
        """Its id.

        Raises:
            LimitReachedError: `limits.sessions`.
            InvalidRequestError: the metadata are no JSON or too large.
        """
        if self._closed:
            raise GoneError("the service is closing")
        about = {"tags": list(tags), "display_name": display_name, "user_metadata": user_metadata}
        check_metadata(about, max_bytes=self._limits.metadata_bytes)
        if len(self._of(owner)) >= self._limits.sessions:
            raise LimitReachedError(
                f"limit sessions: {self._limits.sessions} have not ended; finish one, or wait until one "
                "ends unheard"
            )
        session = Session(
            session_id=self._ids.new_session(owner),
            owner=owner,
            created_s=self._wall_time_s(),
            heard_s=0.0,
            tags=tuple(tags),
            display_name=display_name,
            user_metadata=user_metadata,
        )
        self._sessions[session.session_id] = session
        self._hear(session)
        return session.session_id

    def heartbeat(self, session_id: str, *, owner: str) -> None:
        self.live(session_id, owner)

    def finish(self, session_id: str, *, owner: str) -> None:
        """Models leave the memory, samplers close, what waits fails; in the background. Checkpoints stay.

        Without effect on a session that has ended.
        """
        self._ids.check_session_of(session_id, owner)
        if (session := self._sessions.get(session_id)) is not None:
            self._end(session, f"session {session_id} was finished")

    def info(self, session_id: str, *, owner: str) -> SessionInfo:
        session = self.live(session_id, owner)
        return SessionInfo(
            session_id=session_id,
            created=datetime.fromtimestamp(session.created_s, UTC),
            tags=session.tags,
            display_name=session.display_name,
            user_metadata=session.user_metadata,
            model_ids=tuple(session.model_ids),
            sampling_session_ids=tuple(session.sampling_session_ids),
        )

    def live(self, any_id: str, owner: str) -> Session:
        """The session of a model's, sampler's, request's or its own id; somebody is there."""
        session_id = self._ids.check_session_of(any_id, owner)
        if (session := self._sessions.get(session_id)) is None:
            raise GoneError(
                f"session {session_id} was finished, or nobody was heard of for too long, or it never was"
            )
        self._hear(session)
        return session

    def hear(self, any_id: str, owner: str) -> None:
        """As `live`, but the session may have ended."""
        session = self._sessions.get(self._ids.check_session_of(any_id, owner))
        if session is not None:
            self._hear(session)

    def is_live(self, session: Session) -> bool:
        return session.session_id in self._sessions

    def close(self) -> None:
        """End all."""
        self._closed = True
        for session in tuple(self._sessions.values()):
            self._end(session, "the service is closing")

    def _of(self, owner: str) -> list[Session]:
        return [session for session in self._sessions.values() if session.owner == owner]

    def _hear(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        session.heard_s = loop.time()
        if session.silence is None and self._limits.session_timeout_s is not None:
            session.silence = loop.call_later(self._limits.session_timeout_s, self._check_silence, session)

    def _check_silence(self, session: Session) -> None:
        assert self._limits.session_timeout_s is not None
        loop = asyncio.get_running_loop()
        ends_s = session.heard_s + self._limits.session_timeout_s
        if loop.time() < ends_s:
            session.silence = loop.call_at(ends_s, self._check_silence, session)
        else:
            timeout_s = self._limits.session_timeout_s
            self._end(session, f"nobody was heard of in session {session.session_id} for {timeout_s:g} s")

    def _end(self, session: Session, why: str) -> None:
        del self._sessions[session.session_id]
        if session.silence is not None:
            session.silence.cancel()
        for end in self.on_end:
            end(session, why)

    def list(self, *, owner: str, offset: int = 0, limit: int = 20) -> Page[str]:
        """Ids of those that have not ended, the newest first."""
        return page([session.session_id for session in reversed(self._of(owner))], offset=offset, limit=limit)


def check_metadata(metadata: object, *, max_bytes: int) -> None:
    try:
        size = len(json.dumps(metadata, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the metadata are not JSON: {error}") from error
    if size > max_bytes:
        raise InvalidRequestError(
            f"the metadata take {size} bytes as JSON; limit metadata_bytes is {max_bytes}"
        )


def page(items: Sequence, *, offset: int, limit: int) -> Page:
    if offset < 0 or limit < 0:
        raise InvalidRequestError(f"offset is {offset} and limit {limit}; both are 0 or more")
    return Page(items=tuple(items[offset : offset + limit]), offset=offset, limit=limit, total=len(items))
