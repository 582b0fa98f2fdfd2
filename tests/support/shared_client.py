"""Task whose environments share a client bound to the event loop that created it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from actors.controller import Controller
from rl.loop.warmup import SupervisedWarmup
from rl.rollouts.environment import SingleTurn
from rl.tasks.sum_digits import SumDigits
from rl.types import Observation, Problem, Reply
from tests.support.faulty_configs import short


class Client:
    """Client that fails in another event loop, or after its loop has ended, like those of aiohttp
    and httpx."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    async def ask(self, text: str) -> str:
        answer = self.loop.create_future()  # another loop cannot await this future
        self.loop.call_soon(answer.set_result, text.upper())
        return await answer


class Shared(SumDigits):
    """Shared client of all episodes, created by the first step of the first one."""

    def __init__(self, *, config: SumDigits.Config) -> None:
        super().__init__(config=config)
        self.clients: list[Client] = []

    def environment(self, problem: Problem) -> Asking:
        return Asking(problem=problem, clients=self.clients)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking(SingleTurn):
    """Single-turn environment whose step awaits the client."""

    clients: list[Client]

    @property
    def single_turn(self) -> bool:
        return True

    async def step(self, reply: Reply) -> Observation:
        if not self.clients:
            self.clients.append(Client())
        answer = await self.clients[0].ask("ready")
        return Observation(metrics={"asked": float(answer == "READY")})


def asking() -> Controller.Config:
    """Train for one step after two steps of warm-up."""
    config = short()
    config.warmup = SupervisedWarmup.Config(num_steps=2, num_demonstrations=4)
    config.task = Shared.Config(num_integers=2, num_eval=8)
    config.loop.num_steps = 1
    config.loop.eval_every = 1
    config.loop.episode.step_timeout_s = 20.0
    return config
