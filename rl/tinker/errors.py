"""What a call can be refused or fail with. A transport maps each class to its own form."""

from __future__ import annotations


class TinkerError(Exception):
    """Of any call; the text is for whoever made it."""


class InvalidRequestError(TinkerError, ValueError):
    """The caller's mistake: the text names field, value and what is valid. The same call never succeeds."""


class NotFoundError(TinkerError, LookupError):
    """No such session, model, sampler, request or file, or it is somebody else's."""


class GoneError(TinkerError):
    """It was there and has ended: a session that was finished or not heard of, a result that was fetched
    long ago, work that an earlier process of the server had begun."""


class BusyError(TinkerError):
    """A limit on waiting work: the same call may succeed later."""


class LimitReachedError(TinkerError):
    """A limit on what one owner may hold: models, sessions, storage. Free some first."""
