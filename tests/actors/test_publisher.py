"""Deadlines of the publisher's calls."""

import asyncio
from typing import Any

import pytest

from actors.backend import ActorPublisher
from actors.config import Timeouts
from actors.parity import ParityCheck
from rl.types import PullResult, PushResult
from rl.utils.errors import RunError
from rl.weights.types import WeightStoreError


class Answering:
    """Fake group that answers every call and records the deadlines."""

    timeouts = Timeouts()

    def __init__(self, name, answer):
        self.name, self.answer = name, answer
        self.limits = {}

    def call(self, endpoint, *args, limit_s, **kwargs):
        self.limits[endpoint] = limit_s

        async def answered():
            return [self.answer]

        return answered()


class Dead(Answering):
    def __init__(self):
        super().__init__("generator", None)

    def call(self, endpoint, *args, limit_s, **kwargs):
        async def failed():
            raise RunError("generator is dead")

        return failed()


class Store:
    async def announce(self, version):
        pass

    async def prune(self):
        pass


@pytest.mark.parametrize(("drains", "limit"), [(False, 600.0), (True, 2400.0)])
def test_draining_pull_may_take_as_long_as_the_completions(drains, limit):
    trainer = Answering("trainer", PushResult(policy_version=1, time_s=0.0, num_bytes=0))
    generator = Answering("generator", PullResult(policy_version=1, time_s=0.0))
    store: Any = Store()
    check = ParityCheck(None, drains=drains)
    publisher = ActorPublisher(trainer=trainer, generators=[generator], store=store, check=check)

    async def publish():
        await publisher.serve(await publisher.push())

    asyncio.run(publish())
    assert generator.limits == {"pull_model_state_dict": limit}
    assert trainer.limits == {"push_model_state_dict": 600.0}


def test_version_whose_check_was_cancelled_is_an_error_for_the_next_pull():
    """A cancellation instead of an error would lose a joining generator silently."""

    async def pull_twice():
        check = ParityCheck(None)
        never: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        check.expect(1, sums=[], expected=never)
        with pytest.raises(RunError, match="generator is dead"):
            await check.pull(1, generators=[Dead()])
        await check.pull(1, generators=[])

    with pytest.raises(WeightStoreError, match="version 1 was given up: an earlier pull of it has failed"):
        asyncio.run(pull_twice())
