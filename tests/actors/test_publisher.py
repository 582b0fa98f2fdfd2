"""How long the publisher waits for whom."""

import asyncio
from typing import Any

import pytest

from actors.backend import ActorPublisher
from actors.calls import Timeouts
from actors.sync_check import SyncCheck
from rl.types import PullResult, PushResult


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
