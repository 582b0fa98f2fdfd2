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


def test_each_rank_gets_its_state_back_and_unknown_roles_are_skipped():
    generator_1, generator_10, reward = (Answering(n) for n in ("generator_1", "generator_10", "reward"))
    states = asyncio.run(ActorRandomStates([generator_1, generator_10]).random_states())
    assert states == {
        "generator_1-0": b"generator_1 0",
        "generator_1-1": b"generator_1 1",
        "generator_10-0": b"generator_10 0",
        "generator_10-1": b"generator_10 1",
    }
    # The restored run has one generator less, and a reward process without a saved state.
    asyncio.run(ActorRandomStates([generator_10, reward]).restore_random_states(states))
    assert generator_10.restored == [{0: b"generator_10 0", 1: b"generator_10 1"}]
    assert generator_1.restored == reward.restored == []


def test_unanswered_call_fails_neither_a_save_nor_a_start(caplog):
    groups = [Answering("generator_0", fails=True), Answering("reward")]
    states = asyncio.run(ActorRandomStates(groups).random_states())
    assert list(states) == ["reward-0", "reward-1"]
    asyncio.run(ActorRandomStates(groups).restore_random_states({"generator_0-0": b"x"}))
    for endpoint in ("random_states", "restore_random_states"):
        assert f"{endpoint} of generator_0 failed: generator_0.{endpoint} failed" in caplog.text
