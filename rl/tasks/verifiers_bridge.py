"""Bridge between verifiers' rollouts and relay's generator.

A rollout of verifiers runs with its own harness, tools, stops and rewards; only its model client is
relay's. A request of the trained seat waits until relay's loop has drawn the reply, and the
messages of the request after the last reply are what the environment tells the model. So the
model's tokens are never tokenized again.

    relay:      opening -> draw reply -> step(reply) ----------> observation -> draw reply -> ...
    verifiers:             request waits .... gets the reply, runs tools, asks again
                                              (or ends, and scores)

Everything runs in the event loop of relay's environment thread, because rewards and tools are
foreign code. The chat loop is `ConversationHarness`: verifiers' own harnesses start a program for
every rollout.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AsyncExitStack, suppress
from typing import Any

import aiohttp
from verifiers.v1 import (
    Client,
    Harness,
    HarnessConfig,
    ModelContext,
    ProgramResult,
    Response,
    Runtime,
    Sampling,
    TaskData,
    Trace,
    TrainClientConfig,
    Usage,
)
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.types import AssistantMessage, ToolCall, content_text

from rl.rollouts.replies import join_answer, split_reply
from rl.tasks.verifiers_private import get_state_secrets, make_server, use_server
from rl.tasks.verifiers_task import HARNESS_ID
from rl.tools.tool import BadCall, parse_calls
from rl.types import Message, Observation, Reply
from rl.utils.printing import truncate
from rl.utils.sharing import copy_data

__all__ = ["ConversationHarness"]
"""verifiers looks here for the harness of this plugin."""

logger = logging.getLogger(__name__)

for _name in ("aiohttp.access", "httpx", "httpx2", "verifiers.v1"):
    # These loggers write a line for every request and rollout, unless their level is set before.
    if logging.getLogger(_name).level == logging.NOTSET:
        logging.getLogger(_name).setLevel(logging.WARNING)

POLICY = "policy"
POLICY_CLIENT = TrainClientConfig(base_url="http://policy.invalid/v1")
"""Stands for the generator; no request is sent there. A train client, because replies are not
streamed.
"""
BAD_CALL = "malformed_tool_call"
"""Name under which a malformed call is recorded; its only argument is the error that the model is
shown.
"""
CLOSE_S = 20.0

Wire = dict[str, Any]
"""A message of a chat-completions request."""


class EpisodeError(RuntimeError):
    """A rollout of verifiers failed, or does something that relay cannot follow."""


class PolicyClient(Client):
    """Model client that passes requests to the episodes, by the id of their trace."""

    def __init__(self) -> None:
        self.episodes: dict[str, Episode] = {}

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        episode = self.episodes[session_id or ""]
        if not isinstance(dialect, ChatDialect):
            episode.refuse(f"its harness speaks {type(dialect).__name__}, not chat completions")
        prompt = turn.prompt if turn is not None else dialect.parse_request(body).messages
        reply = await episode.ask(prompt)
        response = to_response(reply, call_prefix=f"call_{episode.num_replies}")
        response.raw = serialize_completion(response, POLICY)
        return response


class Host:
    """Tool servers and model server of a `verifiers.v1.Env`, which its rollouts share.

    All methods but `close` run in the event loop of the environments. `seat` is the agent that is
    trained.
    """

    def __init__(self, env: Any, *, seat: str) -> None:
        self.env = env
        self.seat = seat
        self.policy = PolicyClient()
        self._stopping = asyncio.Event()
        self._ready: asyncio.Future[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._thread = 0

    async def start(self) -> None:
        """Start the servers; idempotent.

        Raises EpisodeError if that fails, now or the first time.
        """
        # Not in __init__, which runs outside of the environments' event loop.
        if self._ready is None:
            self._thread = threading.get_ident()
            self._ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._ready))
        # Shielded: an episode that is cancelled must not cancel the start for the others.
        await asyncio.shield(self._ready)

    def close(self) -> None:
        """End the servers, and wait until they have ended, up to `CLOSE_S`."""
        if self._serving is None or self._serving.done():
            return
        # The servers must end in the loop that they began in, wherever `close` is called.
        loop = self._serving.get_loop()
        if not loop.is_running():
            # In a thread of its own, because the caller's may run another loop.
            end = self._end(self._serving)
            thread = threading.Thread(target=loop.run_until_complete, args=(end,), daemon=True)
            thread.start()
            thread.join(CLOSE_S)
        elif threading.get_ident() == self._thread:  # called by the garbage collector
            self._stopping.set()
        else:
            # The loop may end, or its thread may be busy, before the coroutine has its turn.
            with suppress(RuntimeError, TimeoutError, CancelledError):
                asyncio.run_coroutine_threadsafe(self._end(self._serving), loop).result(CLOSE_S)

    async def _end(self, serving: asyncio.Task[None]) -> None:
        self._stopping.set()
        await asyncio.wait({serving}, timeout=CLOSE_S)

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self.env.serving():
                secrets = get_state_secrets(self.env)
                async with make_server(
                    client=self.policy, config=POLICY_CLIENT, secrets=secrets
                ) as server:
                    use_server(self.env, server)
                    ready.set_result(None)
                    await self._stopping.wait()
        except Exception as error:  # raised by the environment's own code
            if ready.done():
                logger.warning(
                    "the shared parts of an environment ended badly: %r", error, exc_info=error
                )
            else:
                ready.set_exception(EpisodeError(f"the environment cannot be started: {error!r}"))


class Episode:
    """Environment that plays one rollout of verifiers, driven by relay's replies.

    The rollout starts at the first reply.

    Args:
        task: a `verifiers.v1.Task`.
        opening: the opening messages, with the announcement of tools.
        prompt: the opening messages as verifiers has them.
    """

    def __init__(
        self, host: Host, task: Any, *, opening: Sequence[Message], prompt: Sequence[Message]
    ) -> None:
        self._host = host
        self._task = task
        self._opening = opening
        self._messages: list[Message | None] = list(prompt)
        """All messages so far, with None for the model's replies."""
        self.num_replies = 0
        self._requests: asyncio.Queue[tuple[Sequence[Message], asyncio.Future[Reply]]] = (
            asyncio.Queue()
        )
        self._asking: asyncio.Future[Reply] | None = None
        self._run: asyncio.Task[Any] | None = None
        self._traces: list[Any] = []
        """Runs of the trained seat; more than one is refused."""
        self._refusal: str | None = None

    def opening(self) -> Sequence[Message]:
        return self._opening

    async def step(self, reply: Reply) -> Observation:
        """Return the environment's answer to a reply.

        The last answer has rewards among its metrics.
        """
        if self._run is None:
            await self._host.start()
            context = ModelContext(model=POLICY, client=POLICY_CLIENT, sampling=Sampling())
            # Episodes of a task would share what its hooks do to its data.
            task = copy_data(self._task)
            play = self._host.env.run_episode(task, context, on_trace=self._register_trace)
            self._run = asyncio.create_task(play)
            # The first request repeats the opening, which relay has drawn the reply for.
            first = await self._wait_for_messages()
            if first is None:
                raise EpisodeError(
                    f"the environment ended before it asked the model: {self._describe_failure()}"
                )
            if first:
                texts = [f"{m.role}: {truncate(m.content, most=200)!r}" for m in first]
                raise EpisodeError(
                    f"the environment opens with more than its task's prompt: {texts}"
                )
        assert self._asking is not None
        self.num_replies += 1
        self._messages.append(None)
        asking, self._asking = self._asking, None
        asking.set_result(reply)
        messages = await self._wait_for_messages()
        return self._make_outcome() if messages is None else Observation(messages=tuple(messages))

    async def close(self) -> None:
        """Cancel the rollout."""
        if self._run is not None and not self._run.done():
            self._run.cancel()
            await asyncio.wait({self._run}, timeout=CLOSE_S)
        # The harness may still send a last request, which then finds no episode.
        for trace in self._traces:
            self._host.policy.episodes.pop(trace.id, None)

    async def ask(self, prompt: Sequence[Any]) -> Reply:
        """Take a request of the harness and wait for the reply."""
        messages = self._take_new_messages(prompt)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((messages, answer))
        return await answer

    def refuse(self, why: str) -> None:
        """Raise EpisodeError, which verifiers turns into an error of the harness.

        The reason is kept.
        """
        self._refusal = why
        raise EpisodeError(why)

    def _register_trace(self, trace: Any) -> None:
        """Register the trace of the trained agent when its run begins."""
        if trace.agent.name == self._host.seat:
            self._traces.append(trace)
            self._host.policy.episodes[trace.id] = self

    async def _wait_for_messages(self) -> Sequence[Message] | None:
        """Wait for the environment's next messages; return None when the rollout has ended."""
        assert self._run is not None
        # The rollout may end without a further request; then nobody would answer.
        getting = asyncio.create_task(self._requests.get())
        try:
            await asyncio.wait({getting, self._run}, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                return None
            messages, self._asking = getting.result()
            return messages
        finally:
            getting.cancel()

    def _take_new_messages(self, prompt: Sequence[Any]) -> Sequence[Message]:
        """Return the messages of a request after the known ones."""
        if len(self._traces) > 1:
            self.refuse(
                f"seat {self._host.seat!r} plays several runs in one episode; relay trains one"
            )
        # The model's replies are not compared: verifiers has them split into thoughts and calls.
        messages: list[Message | None] = []
        for m in prompt:
            messages.append(None if m.role == "assistant" else self._convert_message(m))
        num_known = len(self._messages)
        if messages[:num_known] != self._messages:
            self.refuse(
                "it does not continue the conversation, but begins another or rewrites this one"
            )
        new = []
        for message in messages[num_known:]:
            if message is None:
                self.refuse("it contains a reply that the model has not given")
            else:
                new.append(message)
        if self.num_replies and not new:
            self.refuse("it asks again without a new message")
        self._messages += new
        return new

    def _convert_message(self, message: Any) -> Message:
        if not isinstance(message.content, str) and any(p.type != "text" for p in message.content):
            self.refuse("it shows the model an image; relay trains only on text")
        return Message(role=message.role, content=content_text(message.content))

    def _make_outcome(self) -> Observation:
        assert self._run is not None
        episode = self._run.result()
        if not episode.ok or self._refusal is not None:
            raise EpisodeError(self._describe_failure())
        (trace,) = self._traces
        missing = sorted(name for name, reward in trace.rewards.items() if reward is None)
        if missing:
            raise EpisodeError(
                f"it was ended before its rewards were computed: {', '.join(missing)}"
            )
        if not trace.rewards:
            raise EpisodeError("it has no rewards, so nothing can be learned from it")

        metrics = {}
        for name, value in trace.metrics.items():
            if value is not None:
                metrics[f"verifiers/{name}"] = float(value)
        # After the metrics: a reward of the same name is what the model is trained on.
        for name, reward in trace.rewards.items():
            metrics[f"verifiers/{name}"] = float(reward.score)
        metrics["verifiers/reward"] = float(trace.reward)
        return Observation(metrics=metrics)

    def _describe_failure(self) -> str:
        assert self._run is not None
        if self._refusal is not None:
            return self._refusal
        errors = [*self._run.result().errors]
        for trace in self._traces:
            errors += trace.errors
        # An error of a trace is often one of the episode too; a dict names it once, in order.
        reasons = dict.fromkeys(f"{error.type}: {error.message}" for error in errors)
        return "; ".join(reasons) or "it gives no reason"


def to_response(reply: Reply, *, call_prefix: str) -> Response:
    """Return a reply as a model server would: with separate thoughts, text and calls."""
    parts = split_reply(reply.text)
    thoughts = [part.text.strip() for part in parts if part.kind == "thought"]
    calls = []
    for i, call in enumerate(parse_calls(reply.text)):
        name, arguments = _name_and_arguments(call)
        calls.append(ToolCall(id=f"{call_prefix}_{i}", name=name, arguments=json.dumps(arguments)))

    # Text after a call has no place in a message of the API, which lists calls after the text.
    before = list(itertools.takewhile(lambda part: part.kind != "call", parts))
    content = join_answer(before) if calls or thoughts else reply.text
    finish_reason = "tool_calls" if calls else "stop"
    if reply.completion.is_cut_off:
        finish_reason = "length"
    return Response(
        id=call_prefix,
        created=0,
        model=POLICY,
        message=AssistantMessage(
            content=content,
            reasoning_content="\n\n".join(thoughts) if thoughts else None,
            tool_calls=calls or None,
        ),
        finish_reason=finish_reason,
        usage=Usage(prompt_tokens=0, completion_tokens=len(reply.completion.token_ids)),
    )


def _name_and_arguments(call: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(call, BadCall):
        return BAD_CALL, {"error": call.error}
    return call.name, dict(call.arguments)


class ConversationConfig(HarnessConfig):
    id: str = HARNESS_ID


class ConversationHarness(Harness[ConversationConfig]):
    """Chat loop like verifiers' `null` harness.

    The loop asks the model and runs tools until a reply calls none.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Run one segment of a rollout, until the model replies without a call."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            servers = {}
            for name, url in mcp_urls.items():
                servers[name] = {"url": url, "timeout": self.config.tool_timeout}
            schemas, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            # No timeout: a reply takes as long as it takes, and the request is cancelled with the
            # rollout.
            http = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
            )
            request: Wire = {"model": ctx.model, "messages": messages}
            if schemas:
                request["tools"] = schemas
            while True:
                headers = {"Authorization": f"Bearer {secret}"}
                async with http.post(
                    f"{endpoint}/chat/completions", json=request, headers=headers
                ) as answer:
                    body = await answer.json()
                    if answer.status != 200:
                        # verifiers answers with an error too when it stops a rollout itself.
                        return ProgramResult(exit_code=1, stdout="", stderr=json.dumps(body))
                message = body["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or []
                if not calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in calls:
                    content = await _answer(call["function"], dispatch, connections)
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": content}
                    )


async def _answer(function: Wire, dispatch: dict[str, tuple[str, str]], connections: Wire) -> Any:
    """Return the result of a call, or the error that the model is shown."""
    name, arguments = function["name"], json.loads(function["arguments"])
    if name == BAD_CALL:
        return arguments["error"]
    if name not in dispatch:
        return f"Error: there is no tool {name!r}; the tools are {', '.join(dispatch) or 'none'}"
    return await call_mcp(connections, dispatch, name, arguments)
