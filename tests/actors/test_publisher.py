"""How long the publisher waits for whom."""

import asyncio
from typing import Any

import pytest

from actors.backend import ActorPublisher
from actors.calls import Timeouts
from actors.sync_check import SyncCheck
from rl.errors import RunError
from rl.types import PullResult, PushResult
from rl.weights.errors import WeightStoreError


class Answering:
    """A group that answers every call, and keeps the deadlines."""

    timeouts = Timeouts()

    def __init__(self, name, answer):
        self.name, self.answer = name, answer
        self.limits = {}

    def call(self, endpoint, *args, limit, **kwargs):
        self.limits[endpoint] = limit

        async def answered():
            return [self.answer]

        return answered()


class Dead(Answering):
    def __init__(self):
        super().__init__("generator", None)

    def call(self, endpoint, *args, limit, **kwargs):
        async def failed():
            raise RunError("generator is dead")

        return failed()


class Store:
    async def announce(self, version):
        pass

    async def prune(self):
        pass


@pytest.mark.parametrize(("drains", "limit"), [(False, "sync_s"), (True, "generate_s + sync_s")])
def test_a_pull_that_drains_may_take_as_long_as_the_completions(drains, limit):
    trainer = Answering("trainer", PushResult(policy_version=1, time_s=0.0, num_bytes=0))
    generator = Answering("generator", PullResult(policy_version=1, time_s=0.0))
    store: Any = Store()
    check = SyncCheck(None, drains=drains)
    publisher = ActorPublisher(trainer=trainer, generators=[generator], store=store, check=check)

    async def publish():
        await publisher.serve(await publisher.push())

    asyncio.run(publish())
    assert generator.limits == {"pull_model_state_dict": limit}
    assert trainer.limits == {"push_model_state_dict": "sync_s"}


def test_a_version_whose_check_was_given_up_is_an_error_for_who_pulls_it_next():
    """Not a cancellation, by which a generator that joins would be lost without a word."""

    async def pull_twice():
        check = SyncCheck(None)
        never: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        check.expect(1, sums=[], expected=never)
        with pytest.raises(RunError, match="generator is dead"):
            await check.pull(1, generators=[Dead()])
        await check.pull(1, generators=[])

    with pytest.raises(WeightStoreError, match="version 1 was given up: a pull of it has failed before"):
        asyncio.run(pull_twice())
