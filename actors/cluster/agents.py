"""Players of a run's agents (`rl.agents.rollouts.AgentPlayer`): the task's own, or the client of
the agents' actor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from monarch.actor import Endpoint

from actors.agents import AgentEndpoint
from actors.cluster.group import ActorGroup, TimeoutName
from actors.launch.calls import ActorCallError, ActorLostError, ActorTimeoutError, get_first_line
from rl.agents.endpoint.queue import GATHER_S, GenerateAnswer, GenerateCall, TakenCalls
from rl.agents.rollouts import AgentPlayer, PlayedTask
from rl.agents.settings import EpisodeSettings
from rl.agents.types import PlayedEpisode, make_failed_play
from rl.protocols import TokenGenerator
from rl.rollouts.renderer import Renderer
from rl.tasks.task import Task
from rl.types import Problem
from rl.utils.errors import RunError

logger = logging.getLogger(__name__)

WAIT_S = 10.0
"""Longest wait of a call that takes the endpoint's calls; then the next one follows."""
END_S = 60.0
"""Time beyond an agent's limit for its end, in which all that it started is ended."""
MAX_LOSSES = 2
"""Losses of the actor during one play after which its rollout has failed."""


class AgentClient:
    """Plays agents in the agents' actor, and answers what they ask.

    Agents that run when the actor is lost are played again by the new one, once.
    """

    def __init__(self, group: ActorGroup, *, max_running: int) -> None:
        self._group = group
        self._slots = asyncio.Semaphore(max_running)
        self._generators: dict[str | None, TokenGenerator] = {}
        """Generator of each episode by its key."""
        self._running: dict[int, asyncio.Task[None]] = {}
        """Calls that are being answered, by their id."""
        self._answers: list[GenerateAnswer] = []
        self._has_answers = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Error that ends the run: of the endpoint, or of the generators."""
        self._to_end: list[str] = []
        """Keys of episodes whose agents nobody waits for any more."""
        self._ending: asyncio.Task[None] | None = None

    async def play(
        self,
        problem: Problem,
        *,
        settings: EpisodeSettings,
        time_limit_s: float,
        generator: TokenGenerator,
    ) -> PlayedEpisode:
        self._generators[settings.key] = generator
        try:
            async with self._slots:
                return await self._play(problem, settings, time_limit_s)
        finally:
            del self._generators[settings.key]

    async def _play(
        self, problem: Problem, settings: EpisodeSettings, time_limit_s: float
    ) -> PlayedEpisode:
        for _ in range(MAX_LOSSES):
            # Raises the loss if nothing is restarted.
            await self._group.wait_until_up()
            try:
                return await self._play_once(problem, settings, time_limit_s)
            except ActorLostError as error:
                if self._failed.done():  # A generator's loss, perhaps.
                    raise
                reason = get_first_line(error)
        await self._group.wait_until_up()
        # Once more could go on for ever: this agent may be what ends the actor, by its memory.
        return make_failed_play(
            f"the agents' actor was lost {MAX_LOSSES} times while this agent ran: {reason}"
        )

    async def _play_once(
        self, problem: Problem, settings: EpisodeSettings, time_limit_s: float
    ) -> PlayedEpisode:
        """Play in the actor that is up now; raise ActorLostError if it is lost meanwhile."""
        call = self._call(
            AgentEndpoint.play,
            problem,
            settings,
            time_limit_s,
            timeout="generate_s",
            extra_s=time_limit_s + END_S,
        )
        playing = asyncio.create_task(call)
        try:
            either: list[asyncio.Future[Any]] = [playing, self._failed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            played: PlayedEpisode = await playing
            return played
        finally:
            if not playing.done():
                playing.cancel()
                self._end_soon(settings.key)

    def _call(
        self, endpoint: Endpoint[..., Any], *args: Any, timeout: TimeoutName, extra_s: float = 0.0
    ) -> Coroutine[Any, Any, Any]:
        """Send a call at once; return its answer, or raise ActorLostError."""
        mesh = self._group.mesh
        answers = self._group.call(endpoint, *args, timeout=timeout, extra_s=extra_s)
        return self._receive(answers, mesh=mesh)

    async def _receive(self, answers: Awaitable[list[Any]], *, mesh: Any) -> Any:
        try:
            (answer,) = await answers
        except ActorTimeoutError as error:
            # An endpoint that hangs is restarted: all agents would wait for it.
            lost = ActorLostError(str(error), role=self._group.name)
            self._group.lose(lost, mesh=mesh)
            raise lost from error
        return answer

    def _end_soon(self, key: str) -> None:
        """End an agent, which would go on otherwise: the actor does not see that a caller left.

        In the background, as the caller may be cancelled.
        """
        self._to_end.append(key)
        if self._ending is None or self._ending.done():
            self._ending = asyncio.create_task(self._end_plays())

    async def _end_plays(self) -> None:
        # Many callers are cancelled at once, and one call is for all of them.
        while self._to_end:
            keys, self._to_end = self._to_end, []
            try:
                await self._group.call(AgentEndpoint.end_plays, keys, timeout="close_s")
            except RunError as error:
                # Their time limits end the agents as well, and so does the end of the actor.
                logger.debug("%d agents were not ended: %s", len(keys), error)

    @asynccontextmanager
    async def answer_calls(self) -> AsyncIterator[None]:
        """Answer the endpoint's calls while the block runs."""
        tasks = [asyncio.create_task(self._take()), asyncio.create_task(self._send())]
        for task in tasks:
            task.add_done_callback(self._note_failure)
        try:
            yield
        finally:
            tasks += [*self._running.values(), *filter(None, [self._ending])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)
            # Raised in `play`; without an agent that plays nobody asks for it.
            self._failed.exception()

    async def _take(self) -> None:
        while True:
            await self._group.wait_until_up()
            try:
                taken: TakenCalls = await self._call(
                    AgentEndpoint.take_calls, WAIT_S, timeout="close_s", extra_s=WAIT_S
                )
            except ActorLostError:
                # The new endpoint counts its calls anew.
                for task in self._running.values():
                    task.cancel()
                continue
            for call_id in taken.cancelled:
                running = self._running.get(call_id)
                if running is not None:
                    running.cancel()
            for call in taken.calls:
                task = asyncio.create_task(self._answer(call))
                task.add_done_callback(self._note_failure)
                self._running[call.id] = task

    async def _answer(self, call: GenerateCall) -> None:
        try:
            answer = await self._draw(call)
        finally:
            if self._running.get(call.id) is asyncio.current_task():
                del self._running[call.id]
        self._answers.append(answer)
        self._has_answers.set()

    async def _draw(self, call: GenerateCall) -> GenerateAnswer:
        generator = self._generators.get(call.session)
        if generator is None:
            # Told, as the endpoint and with it the client would wait for ever.
            return GenerateAnswer(id=call.id, completions=None, error="the episode has ended")
        try:
            completions = await generator.generate(
                call.prompts, sampling=call.sampling, session=call.session
            )
        except Exception as error:
            # Not the error of an episode that was given up, such as by a restart of the trainer.
            if _ends_run(error) and call.session in self._generators:
                raise
            logger.warning("an agent's request failed: %r", error)
            return GenerateAnswer(id=call.id, completions=None, error=str(error))
        return GenerateAnswer(id=call.id, completions=completions)

    async def _send(self) -> None:
        """Bring answers back, together with those that are ready at the same time."""
        while True:
            await self._has_answers.wait()
            await asyncio.sleep(GATHER_S)
            answers, self._answers = self._answers, []
            self._has_answers.clear()
            try:
                await self._call(AgentEndpoint.answer_calls, answers, timeout="close_s")
            except ActorLostError:
                continue  # Nobody waits for them any more.


def _ends_run(error: Exception) -> bool:
    """Return whether an error of a generator ends the run, as it does with other rollouts.

    An endpoint that raises may do so because of one agent's request.
    """
    if isinstance(error, ActorCallError):
        return isinstance(error, ActorLostError)
    return isinstance(error, RunError)


@asynccontextmanager
async def open_player(
    group: ActorGroup | None,
    config: AgentEndpoint.Config | None,
    *,
    task: Task,
    renderer: Renderer,
) -> AsyncIterator[AgentPlayer | None]:
    """Yield the task's own player, or that of the agents' actor, and answer its calls meanwhile.

    Yields None for a task without agents.
    """
    if isinstance(task, PlayedTask):
        async with task.open_player(renderer=renderer) as player:
            yield player
        return
    if group is None or config is None:
        yield None
        return
    client = AgentClient(group, max_running=config.max_running)
    async with client.answer_calls():
        yield client
