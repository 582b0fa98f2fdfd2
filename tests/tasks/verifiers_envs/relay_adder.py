"""A taskset with a tool, which a server shared by all rollouts runs."""

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two integers."""
        return str(a + b)


class AdderData(vf.TaskData):
    answer: str


class AdderTask(vf.Task[AdderData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.messages[-1].content == self.data.answer)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(sum(message.role == "tool" for message in trace.messages))


class Sums(vf.Taskset[AdderTask]):
    def load(self):
        for n in range(20):
            data = AdderData(
                prompt=f"What is {n} + 1000?", system_prompt="Add.", answer=str(n + 1000)
            )
            yield AdderTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.SharedToolsetConfig())]


__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()
