"""An environment of several turns: the player guesses a number and is told where it lies."""

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    answer: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.messages[-1].content == str(self.data.answer))


class Numbers(vf.Taskset[GuessTask]):
    def load(self):
        for n in range(20):
            yield GuessTask(
                GuessData(prompt=f"Guess my number, game {n}.", answer=n), self.config.task
            )


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    num_guesses: int = 3


class Guess(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as game:
            segment = await game.turn()
            for _ in range(self.config.num_guesses - 1):
                guess = int(segment.last_reply)
                if guess == task.data.answer:
                    break
                segment = await game.turn("higher" if guess < task.data.answer else "lower")

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_metric("guesses", float(trace.num_turns))


__all__ = ["Numbers", "Guess"]
