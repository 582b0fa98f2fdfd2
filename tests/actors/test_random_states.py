import asyncio
from typing import Any

from actors.backend import ActorRandomStates
from actors.calls import ActorCallError
from actors.config import Timeouts


class Answering:
    """Fake group of two ranks."""

    timeouts = Timeouts()

    def __init__(self, name: str, *, fails: bool = False) -> None:
        self.name = name
        self.fails = fails
        self.restored: list[dict[int, bytes]] = []

    async def call(self, endpoint: str, *args: Any, extra_s: float = 0.0, **kwargs: Any) -> list[Any]:
        if self.fails:
            raise ActorCallError(f"{self.name}.{endpoint} failed: rank 0 of 2 is dead")
        if endpoint == "random_states":
            return [f"{self.name} {rank}".encode() for rank in range(2)]
        self.restored.append(args[0])
        return [None, None]


def test_each_rank_gets_its_state_back_and_a_group_that_does_not_answer_is_a_warning(caplog):
    saved = [Answering("generator_1"), Answering("generator_10"), Answering("generator_2", fails=True)]
    states = asyncio.run(ActorRandomStates(saved).random_states())
    assert states == {f"{g.name}-{rank}": f"{g.name} {rank}".encode() for g in saved[:2] for rank in range(2)}
    # The restored run has one generator less, and a reward process without a saved state.
    restored = [Answering("generator_10"), Answering("generator_1", fails=True), Answering("reward")]
    asyncio.run(ActorRandomStates(restored).restore_random_states(states))
    assert [g.restored for g in restored] == [[{0: b"generator_10 0", 1: b"generator_10 1"}], [], []]
    assert "random_states of generator_2 failed: generator_2.random_states failed" in caplog.text
    assert "restore_random_states of generator_1 failed" in caplog.text
