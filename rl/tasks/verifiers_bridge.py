"""Where verifiers asks a model, and relay's sampler answers.

A rollout of verifiers runs as its authors meant it: harness, tools, stops, rewards. Only its model client is
ours. A request of the trained seat waits until relay's own loop has drawn the reply, and what the request
says beyond the last reply is what the environment told the model. So nothing that the model produced ever
comes back as text to be tokenized.

    relay:      opening -> draw reply -> step(reply) ----------> observation -> draw reply -> ...
    verifiers:             request waits .... gets the reply, runs tools, asks again (or ends, and scores)

All of it runs in the event loop of a thread of its own, as rewards and tools are other people's code.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from verifiers.v1 import Client, ModelContext, Response, Sampling, TrainClientConfig, Usage
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.types import AssistantMessage, ToolCall, content_text

from rl.rollouts.replies import THINK_CLOSE
from rl.tasks.verifiers_environment import START_S
from rl.tasks.verifiers_harness import BAD_CALL
from rl.tools.calls import OPEN, BadCall, parse_calls
from rl.types import Message, Observation, Reply

logger = logging.getLogger(__name__)

for _name in ("aiohttp.access", "httpx", "httpx2", "verifiers.v1"):
    # A line for every request and rollout; whoever wants them says so before.
    if logging.getLogger(_name).level == logging.NOTSET:
        logging.getLogger(_name).setLevel(logging.WARNING)

POLICY = "policy"
POLICY_CLIENT = TrainClientConfig(base_url="http://policy.invalid/v1")
"""Stands for the sampler; no request is ever sent there. Of this class, because replies come whole."""
CLOSE_S = 20.0

ResultT = TypeVar("ResultT")


class EpisodeError(RuntimeError):
    """A rollout of verifiers that failed, or that relay cannot follow."""


class PolicyClient(Client):
    """Takes the requests of all rollouts that run, by the id of their trace."""

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
        response = as_response(reply, call_prefix=f"call_{episode.num_replies}")
        response.raw = serialize_completion(response, POLICY)
        return response


class PolicyServer(InterceptionServer):
    """verifiers' interception server, whose client for the policy is ours."""

    def __init__(self, policy: PolicyClient, **settings: Any) -> None:
        super().__init__(**settings)
        self._policy = policy

    def _client(self, config: Any) -> Client:
        return self._policy if config == POLICY_CLIENT else super()._client(config)


class Host:
    """The thread in which the rollouts of one environment run.

    Args:
        env: a `verifiers.v1.Env`.
        seat: the agent of it that is trained.
    """

    def __init__(self, env: Any, *, seat: str) -> None:
        self.env = env
        self.seat = seat
        self.policy = PolicyClient()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._ready: Future[None] = Future()

    def submit(self, coroutine: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Run it in the thread, which must have been started."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def start(self) -> None:
        """Start the thread and what all rollouts share, unless they are there.

        Raises:
            EpisodeError: they could not be started, now or the first time: says why.
            TimeoutError: they are not up after `START_S`.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=lambda: asyncio.run(self._serve(self._ready)), name="verifiers", daemon=True
                )
                self._thread.start()
        try:
            error = self._ready.exception(timeout=START_S)
        except TimeoutError:
            raise TimeoutError(f"the environment's shared parts are not up after {START_S:g} s") from None
        if error is not None:
            raise EpisodeError(f"the environment cannot be started: {error!r}") from error

    def close(self) -> None:
        """End the rollouts that run, and the tool servers."""
        if self._thread is None or self._loop is None or self._stopping is None:
            return
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(timeout=CLOSE_S)

    async def _serve(self, ready: Future[None]) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with self.env.serving():
                shared = self.env._shared_tools
                secrets = tuple(s.state_secret for s in shared.values() if s.state_secret)
                async with PolicyServer(self.policy, state_service_secrets=secrets) as server:
                    # What its agents take their slots on; `serving` has no argument for it.
                    self.env._interception = server
                    ready.set_result(None)
                    await self._stopping.wait()
        except Exception as error:  # of an environment's own code
            if ready.done():
                logger.warning("the shared parts of an environment ended badly: %r", error, exc_info=error)
            else:
                ready.set_exception(error)


class Episode:
    """One rollout of verifiers, driven from outside. All methods run in the host's thread.

    Args:
        task: a `verifiers.v1.Task`.
        opening: the messages that relay has told the model, before tools were announced in them.
    """

    def __init__(self, host: Host, task: Any, opening: Sequence[Message]) -> None:
        self._host = host
        self._task = task
        self._told: list[Message | None] = list(opening)
        """All messages until now; None where the model replied."""
        self.num_replies = 0
        self._requests: asyncio.Queue[tuple[Sequence[Message], asyncio.Future[Reply]]] = asyncio.Queue()
        self._asking: asyncio.Future[Reply] | None = None
        self._run: asyncio.Task[Any] | None = None
        self._traces: list[Any] = []
        self._refusal: str | None = None

    async def reply(self, reply: Reply) -> Observation:
        """What the environment says to a reply; the last one has rewards among its metrics.

        Raises:
            EpisodeError: the rollout failed, or cannot be followed.
        """
        if self._run is None:
            self._run = asyncio.create_task(self._play())
            if (first := await self._next()) is None:
                raise EpisodeError(f"the environment ended before it asked the model: {self._failure()}")
            if first:
                told = [f"{m.role}: {m.content[:200]!r}" for m in first]
                raise EpisodeError(f"the environment opens with more than its task's prompt: {told}")
        assert self._asking is not None
        self.num_replies += 1
        self._told.append(None)
        asking, self._asking = self._asking, None
        asking.set_result(reply)
        messages = await self._next()
        return self._outcome() if messages is None else Observation(messages=tuple(messages))

    async def ask(self, prompt: Sequence[Any]) -> Reply:
        """A request of the harness: waits for the reply."""
        messages = self._new_messages(prompt)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((messages, answer))
        return await answer

    def refuse(self, why: str) -> None:
        """Raises EpisodeError, of which verifiers makes an error of the harness; the reason is kept."""
        self._refusal = why
        raise EpisodeError(why)

    async def close(self) -> None:
        """End the rollout, whatever it is at."""
        if self._run is not None and not self._run.done():
            self._run.cancel()
            await asyncio.wait({self._run}, timeout=CLOSE_S)
        for trace in self._traces:
            self._host.policy.episodes.pop(trace.id, None)

    async def _play(self) -> Any:
        context = ModelContext(model=POLICY, client=POLICY_CLIENT, sampling=Sampling())
        return await self._host.env.run_episode(self._task, context, on_trace=self._on_trace)

    def _on_trace(self, trace: Any) -> None:
        """Called as soon as an agent's run begins."""
        if trace.agent.name == self._host.seat:
            self._traces.append(trace)
            self._host.policy.episodes[trace.id] = self

    async def _next(self) -> Sequence[Message] | None:
        """What the environment says next; None when it has ended."""
        assert self._run is not None
        getting = asyncio.create_task(self._requests.get())
        try:
            await asyncio.wait({getting, self._run}, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                return None
            messages, self._asking = getting.result()
            return messages
        finally:
            getting.cancel()

    def _new_messages(self, prompt: Sequence[Any]) -> Sequence[Message]:
        """The messages of a request beyond those that are known."""
        if len(self._traces) > 1:
            self.refuse(f"seat {self._host.seat!r} plays several runs in one episode; relay trains one")
        said = [None if m.role == "assistant" else self._message(m) for m in prompt]
        num_known = len(self._told)
        if said[:num_known] != self._told:
            self.refuse("it does not go on with the conversation, but begins another or rewrites this one")
        new = [message for message in said[num_known:] if message is not None]
        if len(new) != len(said) - num_known:
            self.refuse("it puts words into the model's mouth: a reply that the model has not given")
        if self.num_replies and not new:
            self.refuse("it asks again without having said anything")
        self._told += new
        return new

    def _message(self, message: Any) -> Message:
        if not isinstance(message.content, str) and any(p.type != "text" for p in message.content):
            self.refuse("it shows the model an image; relay trains on text alone")
        return Message(role=message.role, content=content_text(message.content))

    def _outcome(self) -> Observation:
        assert self._run is not None
        episode = self._run.result()
        if not episode.ok or self._refusal is not None:
            raise EpisodeError(self._failure())
        (trace,) = self._traces
        if missing := sorted(name for name, reward in trace.rewards.items() if reward is None):
            raise EpisodeError(f"it was ended before its rewards were there: {', '.join(missing)}")
        if not trace.rewards:
            raise EpisodeError("it has no rewards: nothing can be learnt from it")
        rewards = {name: reward.score for name, reward in trace.rewards.items()}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return Observation(
            metrics={
                **{f"verifiers/{name}": float(value) for name, value in {**metrics, **rewards}.items()},
                "verifiers/reward": float(trace.reward),
            }
        )

    def _failure(self) -> str:
        assert self._run is not None
        if self._refusal is not None:
            return self._refusal
        episode = self._run.result()
        errors = [*episode.errors, *(error for trace in self._traces for error in trace.errors)]
        reasons = dict.fromkeys(f"{error.type}: {error.message}" for error in errors)
        return "; ".join(reasons) or "it gives no reason"


def as_response(reply: Reply, *, call_prefix: str) -> Response:
    """A reply as a model server would return it: thoughts, text and calls apart."""
    thoughts, thinks, text = reply.text.rpartition(THINK_CLOSE)
    calls = [
        ToolCall(id=f"{call_prefix}_{i}", name=name, arguments=json.dumps(arguments))
        for i, (name, arguments) in enumerate(map(_name_and_arguments, parse_calls(reply.text)))
    ]
    content = text.partition(OPEN)[0].strip() if calls else text.strip() if thinks else text
    cut_off = reply.completion.finish_reason == "length"
    return Response(
        id=call_prefix,
        created=0,
        model=POLICY,
        message=AssistantMessage(
            content=content,
            reasoning_content=thoughts.replace("<think>", "").strip() if thinks else None,
            tool_calls=calls or None,
        ),
        finish_reason="length" if cut_off else "tool_calls" if calls else "stop",
        usage=Usage(prompt_tokens=0, completion_tokens=len(reply.completion.token_ids)),
    )


def _name_and_arguments(call: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(call, BadCall):
        return BAD_CALL, {"error": call.error}
    return call.name, dict(call.arguments)
