"""HTTP application of the endpoint: paths of the dialects, their errors, streams.

    /v1/chat/completions, /v1/responses, /v1/messages    a reply, whole or streamed
    /inference/v1/generate                               the same of tokens, as vLLM has it
    /v1/completions                                      the same of a text, without a memory
    /v1/messages/count_tokens, /v1/models                no reply
    /v1/reward                                           numbers that the agent posts

All paths also stand under /episodes/<key>, which names the episode as the key in a header does.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import sys
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterator,
    Mapping,
)
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rl.agents.dialects import chat, completions, messages, responses, tokens
from rl.agents.dialects.checking import show_name, show_value
from rl.agents.dialects.reply_reader import ParsedReply
from rl.agents.endpoint.answering import Answer
from rl.agents.endpoint.branches import ROLES
from rl.agents.endpoint.episode import AgentEpisode
from rl.agents.endpoint.episodes import Endpoint
from rl.agents.endpoint.retries import IDEMPOTENCY_KEY, RequestIdentity, read_error
from rl.agents.types import BadRequestError, ChatReply, ChatRequest, RequestError
from rl.http.guard import AccessGuard, RefusedError
from rl.utils.nesting import exceeds_depth
from rl.utils.pace import Pace
from rl.utils.proxies import LOOPBACK_NAMES

logger = logging.getLogger(__name__)

PREFIX = "/episodes/"
"""Start of the paths that have the key of an episode in them."""
COUNT_PATH = "/v1/messages/count_tokens"
BUFFERED_BYTES = 65_536
"""Bytes that the server takes for a client without waiting."""
KEEP_ALIVE_S = 5.0
"""Seconds between two signs of life of a stream. Shorter waits have the status of their error."""
FIRST_TRY = "x-stainless-retry-count"
"""Header in which the clients of OpenAI and Anthropic count their retries."""
ROLE = "x-relay-role"
"""Header by which a client may name the role of a conversation, such as sub-agent."""
SUB_AGENT = "x-openai-subagent"
"""Header by which Codex marks the requests of its sub-agents."""
HEALTH = "/health"
MAX_DEPTH = 100
"""Most levels of objects and lists in a body: parts of it are kept in episodes, which pickle."""
MAX_POSTED = 64
"""Most names of numbers that an agent may post."""
POSTED_NAME = re.compile(r"[\w./ -]{1,100}")
"""Such a name, which becomes that of a metric."""


class Dialect(Protocol):
    """Module that reads requests of one API and writes its replies."""

    KEEP_ALIVE: bytes
    """Sign of life of a stream, which clients skip."""

    def read_request(self, body: Mapping[str, Any]) -> ChatRequest: ...

    def make_body(
        self, reply: ChatReply, request: ChatRequest, parsed: ParsedReply
    ) -> dict[str, Any]: ...

    def stream_body(self, reply: ChatReply, request: ChatRequest, parsed: ParsedReply) -> bytes: ...

    def stream_error(self, error: RequestError, request: ChatRequest) -> bytes: ...

    def make_error(self, error: RequestError) -> tuple[int, dict[str, Any]]: ...


class Answerer(Protocol):
    """What answers the requests of a key: an episode, or a model without a memory."""

    async def reply(
        self, request: ChatRequest, *, identity: RequestIdentity, role: str = ""
    ) -> Answer: ...

    def count_refused(self) -> None: ...

    def mark_delivered(self, answer: Answer) -> None: ...

    def mark_cut_off(self, answer: Answer) -> None: ...

    async def count_tokens(self, request: ChatRequest) -> int: ...

    def list_models(self) -> list[str]: ...


DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/inference/v1/generate": tokens,
    "/v1/completions": completions,
}
WITHOUT_MEMORY = "/v1/completions"
"""Path that no episode has: its prompts are texts, which need not be those of earlier tokens."""


def make_app(
    endpoint: Endpoint, *, max_body_bytes: int, hosts: Collection[str] | None = LOOPBACK_NAMES
) -> FastAPI:
    """Build the application of a run's endpoint; `hosts` are those of `AccessGuard`."""
    app = FastAPI(title="relay agents", openapi_url=None)

    def find(request: Request) -> AgentEpisode:
        return endpoint.find(read_key(request.scope))

    router = APIRouter()
    add_dialects(router, find=find, paths=[path for path in DIALECTS if path != WITHOUT_MEMORY])

    async def post_reward(request: Request) -> Response:
        return await _guard(request, lambda: _take_reward(request, find(request)))

    router.add_route("/v1/reward", post_reward, methods=["POST"])
    app.include_router(router)
    app.include_router(router, prefix=f"{PREFIX}{{key}}")
    add_common(app)
    app.add_middleware(AgentGuard, endpoint=endpoint, hosts=hosts, max_body_bytes=max_body_bytes)
    return app


def add_dialects(
    router: APIRouter,
    *,
    find: Callable[[Request], Answerer],
    paths: Collection[str] = DIALECTS,
) -> None:
    """Add paths of dialects; `find` returns what answers a request."""

    async def reply(request: Request) -> Response:
        return await _guard(request, lambda: _reply(request, find(request)))

    async def count(request: Request) -> Response:
        return await _guard(request, lambda: _count(request, find(request)))

    async def list_models(request: Request) -> Response:
        return await _guard(request, lambda: _list_models(request, find(request)))

    for path in paths:
        router.add_route(path, reply, methods=["POST"])
    router.add_route(COUNT_PATH, count, methods=["POST"])
    router.add_route("/v1/models", list_models, methods=["GET"])


def add_common(app: FastAPI) -> None:
    """Add the health check, and the errors of requests that reach no dialect, in its form."""
    app.add_api_route(HEALTH, _answer_health, methods=["GET"])
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_unexpected)


class AgentGuard(AccessGuard):
    """Guard of the endpoint: the key must name an open episode."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        endpoint: Endpoint,
        hosts: Collection[str] | None,
        max_body_bytes: int,
    ) -> None:
        super().__init__(app, hosts=hosts)
        self._endpoint = endpoint
        self._max_body_bytes = max_body_bytes
        self._pace = Pace()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A group of agents asks at the same time.
        await self._pace.wait_for_turn()
        await super().__call__(scope, receive, send)

    def is_open(self, scope: Scope) -> bool:
        return bool(scope["path"] == HEALTH)

    def find_owner(self, scope: Scope) -> str:
        key = read_key(scope)
        try:
            self._endpoint.find(key)
        except RequestError as error:
            raise RefusedError(error.status, str(error)) from None
        return key

    def limit_bytes(self, scope: Scope) -> int:
        return self._max_body_bytes

    def make_refusal(self, scope: Scope, refused: RefusedError) -> Response:
        if refused.status == 413 and not self.is_open(scope):
            try:
                self._endpoint.find(read_key(scope)).count_refused()
            except RequestError as error:
                return make_error_response(scope["path"], error)
        return make_refusal_response(scope["path"], refused)


def read_key(scope: Scope) -> str:
    """Return the key in a request's path, or else in its headers; empty if there is none."""
    path: str = scope["path"]
    if path.startswith(PREFIX):
        return path.removeprefix(PREFIX).partition("/")[0]
    headers = Headers(scope=scope)
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


async def _guard(request: Request, work: Callable[[], Any]) -> Response:
    """Return the response of some work, or its error in the dialect's form."""
    path = request.url.path
    try:
        response: Response = await work()
        return response
    except RequestError as error:
        return make_error_response(path, error)
    except Exception as error:
        logger.error("a request of an agent failed: %r", error, exc_info=error)
        return make_error_response(path, _make_failure(error))


def _make_failure(error: Exception) -> RequestError:
    return RequestError(f"the server failed: {error}", status=500)


async def _reply(request: Request, answerer: Answerer) -> Response:
    path = _strip_prefix(request.url.path)
    dialect = DIALECTS[path]
    raw = await request.body()
    with _count_refused(answerer):
        wanted = dialect.read_request(_read_json(raw))
        role = _read_role(request.headers)
    identity = _identify(path, raw, request.headers, role=role)
    answering = asyncio.ensure_future(answerer.reply(wanted, identity=identity, role=role))
    answering.add_done_callback(read_error)
    if wanted.is_streamed:
        await asyncio.wait({answering}, timeout=KEEP_ALIVE_S)
        if answering.done():
            answering.result()  # An error of a request that was refused at once has its status.
        stream = _stream(answering, dialect, wanted, request=request, answerer=answerer)
        return ClosedStream(stream, media_type="text/event-stream", headers=_NO_CACHE)
    if not await _wait_while_connected(request, answering):
        return Response(status_code=499)
    answer = answering.result()
    body = dialect.make_body(answer.reply, wanted, answer.parsed)
    # Before it is sent: the client may make its next request as soon as it has the reply.
    answerer.mark_delivered(answer)
    written = json.dumps(body, ensure_ascii=False, allow_nan=False).encode(errors="replace")
    kind = "application/json"
    if len(written) <= BUFFERED_BYTES:
        return Response(written, media_type=kind)
    mark_cut_off = partial(answerer.mark_cut_off, answer)
    parts, length = _send(written, request, mark_cut_off=mark_cut_off), str(len(written))
    return ClosedStream(parts, media_type=kind, headers={"content-length": length})


@contextmanager
def _count_refused(answerer: Answerer) -> Iterator[None]:
    """Count a request that the block refuses."""
    try:
        yield
    except RequestError:
        answerer.count_refused()
        raise


_NO_CACHE = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class ClosedStream(StreamingResponse):
    """Stream whose source ends with it, also when the client disconnects."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            assert isinstance(self.body_iterator, AsyncGenerator)
            await self.body_iterator.aclose()


async def _stream(
    answering: asyncio.Future[Answer],
    dialect: Dialect,
    wanted: ChatRequest,
    *,
    request: Request,
    answerer: Answerer,
) -> AsyncIterator[bytes]:
    """Yield the events of a reply; signs of life before, and an error in place of a reply."""
    try:
        while not answering.done():
            await asyncio.wait({answering}, timeout=KEEP_ALIVE_S)
            if not answering.done():
                yield dialect.KEEP_ALIVE
        answer = answering.result()
        answerer.mark_delivered(answer)
        body = dialect.stream_body(answer.reply, wanted, answer.parsed)
        mark_cut_off = partial(answerer.mark_cut_off, answer)
        async with aclosing(_send(body, request, mark_cut_off=mark_cut_off)) as parts:
            async for part in parts:
                yield part
    except RequestError as error:
        yield dialect.stream_error(error, wanted)
    except Exception as error:
        logger.error("a request of an agent failed: %r", error, exc_info=error)
        yield dialect.stream_error(_make_failure(error), wanted)
    finally:
        # The client has gone if this is not done.
        answering.cancel()


async def _send(
    body: bytes, request: Request, *, mark_cut_off: Callable[[], None]
) -> AsyncGenerator[bytes]:
    """Yield a body in parts; `mark_cut_off` is told of a client that stops reading."""
    if len(body) <= BUFFERED_BYTES:
        yield body
        return
    is_taken = False
    try:
        # In two parts: before the second the server waits until the client has taken the first.
        yield body[:-1]
        yield body[-1:]
        is_taken = not await request.is_disconnected()
    finally:
        # The server closes the connection of a client that stops reading.
        if not is_taken:
            mark_cut_off()


async def _wait_while_connected(request: Request, answering: asyncio.Future[Answer]) -> bool:
    """Wait for an answer; cancel the wait and return False if the client disconnects."""
    # After the body the connection has nothing to say but its end.
    gone = asyncio.ensure_future(request.receive())
    either: list[asyncio.Future[Any]] = [answering, gone]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return answering.done()
    finally:
        gone.cancel()
        answering.cancel()


async def _count(request: Request, answerer: Answerer) -> Response:
    with _count_refused(answerer):
        wanted = messages.read_count_request(_read_json(await request.body()))
        return _respond(messages.make_count(await answerer.count_tokens(wanted)))


async def _list_models(request: Request, answerer: Answerer) -> Response:
    models = answerer.list_models()
    if "anthropic-version" in request.headers:
        described = [{"type": "model", "id": name, "display_name": name} for name in models]
        return _respond({"data": described, "has_more": False})
    described = [{"id": name, "object": "model", "owned_by": "relay"} for name in models]
    return _respond({"object": "list", "data": described})


async def _take_reward(request: Request, episode: AgentEpisode) -> Response:
    body = _read_json(await request.body())
    if not body:
        raise BadRequestError('the body must have numbers, such as {"reward": 1.0}')
    posted = dict(episode.posted)
    for name, value in body.items():
        if POSTED_NAME.fullmatch(name) is None:
            raise BadRequestError(
                f"{show_value(name)}: a name must be 1 to 100 letters, digits, spaces and "
                "characters of './_-'"
            )
        # Larger integers than a float can hold are numbers in JSON.
        is_number = isinstance(value, int | float) and -sys.float_info.max <= value
        if not (is_number and value <= sys.float_info.max):
            raise BadRequestError(f"{name} must be a finite number", field=name)
        posted[name] = float(value)
    if len(posted) > MAX_POSTED:
        raise BadRequestError(f"{len(posted)} names of numbers: must be at most {MAX_POSTED}")
    episode.posted = posted
    return _respond({"posted": episode.posted})


def _respond(body: Any) -> Response:
    return Response(json.dumps(body), media_type="application/json")


def _read_json(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    # Nearly every body has too few brackets to be nested deeply, and is not looked through.
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH:
        for name, value in body.items():
            if exceeds_depth(value, most=MAX_DEPTH - 1):
                shown = show_name(name)
                raise BadRequestError(
                    f"{shown} is nested too deeply: a body may have {MAX_DEPTH} levels", field=shown
                )
    return body


def _identify(path: str, raw: bytes, headers: Headers, *, role: str) -> RequestIdentity:
    """Return what tells a request from others of its episode."""
    name = headers.get(IDEMPOTENCY_KEY)
    start = f"{path}\0{role}\0".encode()
    if name is not None:
        return RequestIdentity(digest=_digest(start + b"named " + name.encode()), body=_digest(raw))
    retries = headers.get(FIRST_TRY)
    return RequestIdentity(
        digest=_digest(start + raw), is_first_try=None if retries is None else retries == "0"
    )


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _read_role(headers: Headers) -> str:
    role = headers.get(ROLE, "sub-agent" if SUB_AGENT in headers else "")
    if role and role not in ROLES:
        raise BadRequestError(f"{ROLE}: {role:.80}: must be {', '.join(ROLES)}", field=ROLE)
    return role


def _strip_prefix(path: str) -> str:
    """Return the path of a dialect in a path that has it behind a prefix."""
    for known in (*DIALECTS, COUNT_PATH):
        if path.endswith(known):
            return known
    return path


def make_error_response(path: str, error: RequestError) -> Response:
    """Return an error in the form of the dialect that a path is of; that of OpenAI elsewhere."""
    place = _strip_prefix(path)
    dialect = messages if place.startswith("/v1/messages") else DIALECTS.get(place, chat)
    status, body = dialect.make_error(error)
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.status == 409:
        # The clients of OpenAI and Anthropic would repeat it, but an ended episode stays ended.
        headers["x-should-retry"] = "false"
    return Response(json.dumps(body), status, headers, "application/json")


def make_refusal_response(path: str, refused: RefusedError) -> Response:
    """Return the guard's refusal of a request in the form of the dialect that its path is of."""
    again = 1.0 if refused.status == 429 else None
    error = RequestError(str(refused), status=refused.status, retry_after_s=again)
    return make_error_response(path, error)


async def _answer_health() -> dict[str, str]:
    return {"status": "ok"}


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = _strip_prefix(request.url.path)
    told = RequestError(
        f"{request.method} {path:.200}: the endpoint does not have this path",
        status=error.status_code,
    )
    return make_error_response(request.url.path, told)


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    logger.error("a request of an agent failed", exc_info=error)
    return make_error_response(request.url.path, RequestError("the server failed", status=500))
