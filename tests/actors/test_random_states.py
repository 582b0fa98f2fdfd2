import asyncio
from typing import Any

from actors.calls import ActorCallError, Timeouts
from actors.random_states import ActorRandomStates


class Answering:
    """A group of two ranks."""

    timeouts = Timeouts()

    def __init__(self, name: str, *, fails: bool = False) -> None:
        self.name = name
        self.fails = fails
        self.restored: list[dict[int, bytes]] = []

    async def call(self, endpoint: str, *args: Any, limit: str, **kwargs: Any) -> list[Any]:
        assert limit == "close_s"  # nobody waits long for these
        if self.fails:
            raise ActorCallError(f"{self.name}.{endpoint} failed: rank 0 of 2 is dead")
        if endpoint == "random_states":
            return [f"{self.name} {rank}".encode() for rank in range(2)]
        self.restored.append(args[0])
        return [None, None]


def test_each_rank_gets_back_what_it_had_and_other_names_are_passed_over():
    generator_1, generator_10, reward = (Answering(n) for n in ("generator_1", "generator_10", "reward"))
    states = asyncio.run(ActorRandomStates([generator_1, generator_10]).random_states())
    assert states == {
        "generator_1-0": b"generator_1 0",
        "generator_1-1": b"generator_1 1",
        "generator_10-0": b"generator_10 0",
        "generator_10-1": b"generator_10 1",
    }
    # There is one generator less now, and a reward process that has none.
    asyncio.run(ActorRandomStates([generator_10, reward]).restore_random_states(states))
    assert generator_10.restored == [{0: b"generator_10 0", 1: b"generator_10 1"}]
    assert generator_1.restored == reward.restored == []


def test_a_group_that_does_not_answer_stops_neither_a_save_nor_a_start(caplog):
    groups = [Answering("generator_0", fails=True), Answering("reward")]
    states = asyncio.run(ActorRandomStates(groups).random_states())
    assert list(states) == ["reward-0", "reward-1"]
    asyncio.run(ActorRandomStates(groups).restore_random_states({"generator_0-0": b"x"}))
    assert "random states of generator_0 are not saved: generator_0.random_states failed" in caplog.text
    assert "random states of generator_0 are not restored" in caplog.text
