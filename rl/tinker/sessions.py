"""Sessions: what a client holds, and what ends when it goes."""

from __future__ import annotations

from collections.abc import Sequence

from rl.tinker.responses import Metadata, Page, SessionInfo


class Sessions:
    """All raise NotFoundError for another's or an unknown session, GoneError for one that has ended.

    Every call about a session, its models or its sampling sessions tells that somebody is there.
    """

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
        """
        ...

    def heartbeat(self, session_id: str, *, owner: str) -> None: ...

    def finish(self, session_id: str, *, owner: str) -> None:
        """Models leave the memory, samplers close, what waits fails; in the background. Checkpoints stay.

        Without effect on a session that has ended.
        """
        ...

    def info(self, session_id: str, *, owner: str) -> SessionInfo: ...

    def list(self, *, owner: str, offset: int = 0, limit: int = 20) -> Page[str]:
        """Ids of those that have not ended, the newest first."""
        ...
