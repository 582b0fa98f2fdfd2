"""The official client's exceptions, for what the service refuses and for work that failed.

A status error has a response, as if a server had sent it: code that looks at `status_code` or `body` finds
there what it would find with one.
"""

from __future__ import annotations

import httpx
import tinker

from rl.tinker import errors
from rl.tinker.service.responses import Failure

URL = "http://in-process.invalid/api/v1"
"""Of no server: a response names a request, and a request a URL."""

STATUSES: dict[type[errors.TinkerError], tuple[type[tinker.APIStatusError], int]] = {
    errors.InvalidRequestError: (tinker.BadRequestError, 400),
    errors.NotFoundError: (tinker.NotFoundError, 404),
    errors.GoneError: (tinker.APIStatusError, 410),
    errors.BusyError: (tinker.RateLimitError, 429),
    errors.LimitReachedError: (tinker.PermissionDeniedError, 403),
}


def official_error(error: errors.TinkerError) -> tinker.APIStatusError:
    """What the official client raises for this refusal, with the refusal's text alone as its message."""
    of_kinds = (of_kind for kind, of_kind in STATUSES.items() if isinstance(error, kind))
    official, status = next(of_kinds, (tinker.InternalServerError, 500))
    body = {"detail": str(error)}
    response = httpx.Response(status, json=body, request=httpx.Request("POST", URL))
    return official(str(error), response=response, body=body)


def failed(failure: Failure, *, request_id: str) -> tinker.RequestFailedError:
    """Of work that was taken on; the text is the failure's."""
    return tinker.RequestFailedError(
        f"Request failed: {failure.error}",
        request_id=request_id,
        category=tinker.types.RequestErrorCategory(failure.category),
    )
