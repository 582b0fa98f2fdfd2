"""A taskset of one turn: two rewards, of which one is asynchronous, and a metric."""

import asyncio

import verifiers.v1 as vf
from pydantic import Field


class SumData(vf.TaskData):
    answer: str
    hints: list[str] = Field(default_factory=lambda: ["add"])
    """Used up by each episode."""


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.8)
    async def right(self, trace: vf.Trace) -> float:
        await asyncio.sleep(0)
        self.data.hints.pop()
        return float(trace.messages[-1].content == self.data.answer)

    @vf.reward(weight=0.2)
    async def short(self, trace: vf.Trace) -> float:
        if trace.messages[-1].content == "raise":
            raise ValueError("this reward raises")
        return float(len(trace.messages[-1].content) < 5)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.messages[-1].content))


class SumsConfig(vf.TasksetConfig):
    first: int = 0
    num: int = 40


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for n in range(self.config.first, self.config.first + self.config.num):
            yield SumTask(
                SumData(prompt=f"{n} + 1 = ?", system_prompt="Add.", answer=str(n + 1)),
                self.config.task,
            )


__all__ = ["Sums"]
