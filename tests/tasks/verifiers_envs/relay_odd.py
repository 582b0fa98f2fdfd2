"""Environments that relay cannot train on, whose episodes go wrong, or that are unusual."""

import asyncio
from collections.abc import Iterable
from typing import Any, ClassVar

import verifiers.v1 as vf


def taskset(**data: Any) -> type[vf.Taskset]:
    """One whose rows have this data beside their prompt."""

    class Rows(vf.Taskset[vf.Task]):
        def load(self) -> Iterable[vf.Task]:
            for n in range(30):
                yield vf.Task(vf.TaskData(**{"prompt": f"row {n}", **data}))

    return Rows


class Endless(vf.Taskset[vf.Task]):
    INFINITE = True

    def load(self) -> Iterable[vf.Task]:
        n = 0
        while True:
            yield vf.Task(vf.TaskData(prompt=f"row {n}"))
            n += 1


class BoxedTask(vf.Task):
    NEEDS_CONTAINER: ClassVar[bool] = True


class Boxed(vf.Taskset[BoxedTask]):
    def load(self) -> Iterable[BoxedTask]:
        yield BoxedTask(vf.TaskData(prompt="row"))


class DuoConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    partner: vf.AgentConfig = vf.AgentConfig()


class Duo(vf.Env[DuoConfig]):
    """The partner answers the row, and the player is told what it said."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as player:
            asked = await player.turn()
            trace = await agents.partner.run(vf.Task(vf.TaskData(prompt=asked.last_reply)))
            await player.turn(f"partner: {trace.messages[-1].content}")


class ScoredTask(vf.Task):
    @vf.reward
    async def replied(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Scored(vf.Taskset[ScoredTask]):
    def load(self) -> Iterable[ScoredTask]:
        for n in range(30):
            yield ScoredTask(vf.TaskData(prompt=f"row {n}"))


class StuckTask(vf.Task):
    @vf.reward
    async def never(self, trace: vf.Trace) -> float:
        await asyncio.Event().wait()
        return 1.0


class StuckConfig(vf.TasksetConfig):
    scoring_s: float | None = None


class Stuck(vf.Taskset[StuckTask, StuckConfig]):
    """Environment whose reward never comes, with or without a time limit."""

    def load(self) -> Iterable[StuckTask]:
        timeout = vf.TaskTimeout(scoring=self.config.scoring_s)
        for n in range(30):
            yield StuckTask(vf.TaskData(prompt=f"row {n}", timeout=timeout))


class Twice(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.agent.run(task)
        await agents.agent.run(task)


class Ventriloquist(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as exchange:
            await exchange.turn()
            await exchange.turn(
                [
                    vf.UserMessage(content="and?"),
                    vf.AssistantMessage(content="I say so"),
                    vf.UserMessage(content="and?"),
                ]
            )


class Examples(vf.Taskset[ScoredTask]):
    """Rows with a reply as an example."""

    def load(self) -> Iterable[ScoredTask]:
        for n in range(30):
            prompt = [
                vf.UserMessage(content="row 1000"),
                vf.AssistantMessage(content="1000"),
                vf.UserMessage(content=f"row {n}"),
            ]
            yield ScoredTask(vf.TaskData(prompt=prompt))


class Unprompted(vf.Taskset[ScoredTask]):
    def load(self) -> Iterable[ScoredTask]:
        for n in range(30):
            yield ScoredTask(vf.TaskData(name=f"row {n}"))


class Opener(vf.Env[vf.SingleAgentEnvConfig]):
    """Makes the prompt of a row that has none."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as exchange:
            await exchange.turn(task.data.name)


class BrokenStart(vf.Env[vf.SingleAgentEnvConfig]):
    async def start(self) -> None:
        raise OSError("no database")

    async def run(self, task: vf.Task, agents: vf.Agents) -> None: ...


class Preface(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.agent.run(task.with_system_prompt("You are somebody else."))
