"""A task whose environments share a client that belongs to the event loop in which it is made."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from actors.controller import Controller
from rl.rollouts.environment import SingleTurn
from rl.supervised import SupervisedWarmup
from rl.tasks.sum_digits import SumDigits
from rl.types import Observation, Problem, Reply
from tests.support.faulty_configs import short


class Client:
    """As those of aiohttp and httpx: of no use in another event loop, or when that has ended."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.asked: asyncio.Queue[tuple[str, asyncio.Future[str]]] = asyncio.Queue()
        self.serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            text, answer = await self.asked.get()
            answer.set_result(text.upper())

    async def ask(self, text: str) -> str:
        answer = self.loop.create_future()  # which a task of another loop cannot await
        await self.asked.put((text, answer))
        return await answer


class Shared(SumDigits):
    """The first step of the first episode makes the client of all."""

    @dataclass(kw_only=True, slots=True)
    class Config(SumDigits.Config):
        pass

    def __init__(self, *, config: Config) -> None:
        super().__init__(config=config)
        self.clients: list[Client] = []

    def environment(self, problem: Problem) -> Asking:
        return Asking(problem=problem, clients=self.clients)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking(SingleTurn):
    """Of one turn, whose step waits for the client."""

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
    """Warmed up for two steps, and trained for one."""
    config = short()
    config.warmup = SupervisedWarmup.Config(num_steps=2, num_demonstrations=4)
    config.task = Shared.Config(num_integers=2, num_eval=8)
    config.loop.num_steps = 1
    config.loop.eval_every = 1
    config.loop.episode.step_timeout_s = 20.0
    return config
