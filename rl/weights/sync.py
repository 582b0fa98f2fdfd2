"""When weights travel: behind the learner's next gradient, one version at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rl.clock import now_s
from rl.protocols import WeightPublisher
from rl.types import PublishResult

logger = logging.getLogger(__name__)


class WeightSync:
    """Publishes in the background.

    `begin` waits until the version before is served. The learner may compute while a push runs, and has
    to wait for `pushed` before it changes the weights.
    """

    def __init__(self, publisher: WeightPublisher, *, on_failure: Callable[[BaseException], None]) -> None:
        """`on_failure` is told of an error as soon as it comes up; `begin`, `pushed`, `served` raise it."""
        self._publisher = publisher
        self._on_failure = on_failure
        self._push: asyncio.Task[PublishResult] | None = None
        self._serve: asyncio.Task[PublishResult] | None = None
        self._last: PublishResult | None = None

    @property
    def last(self) -> PublishResult:
        """Of the newest version that is served; there has to be one."""
        assert self._last is not None, "nothing was published"
        return self._last

    async def begin(self, on_served: Callable[[], None] | None = None) -> None:
        """Start to publish the learner's weights as they are; `on_served` is called when all serve them."""
        if self._serve is not None:
            await self.served()
        self._push = asyncio.create_task(self._timed_push(), name="push of weights")
        self._serve = asyncio.create_task(self._timed_serve(self._push, on_served), name="pull of weights")
        # The push is sent before this returns, and so before what the learner is asked for next: after that
        # it would be late by as long as that takes.
        await asyncio.sleep(0)

    async def pushed(self) -> None:
        """Until the learner may change its weights."""
        if self._push is not None:
            await asyncio.shield(self._push)

    async def served(self) -> PublishResult:
        """Until every sampler serves what was begun last; there has to be something."""
        assert self._serve is not None, "nothing was published"
        return await asyncio.shield(self._serve)

    async def close(self) -> None:
        """End what is under way. Idempotent."""
        tasks = [task for task in (self._push, self._serve) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _timed_push(self) -> PublishResult:
        started = now_s()
        version = await self._publisher.push()
        return PublishResult(policy_version=version, push_s=now_s() - started, pull_s=0.0)

    async def _timed_serve(
        self, push: asyncio.Task[PublishResult], on_served: Callable[[], None] | None
    ) -> PublishResult:
        try:
            pushed = await push
            started = now_s()
            checked = await self._publisher.serve(pushed.policy_version)
            result = PublishResult(
                policy_version=pushed.policy_version,
                push_s=pushed.push_s,
                pull_s=now_s() - started - checked.canary_s,
                canary_diff=checked.canary_diff,
                canary_s=checked.canary_s,
            )
            # Of each version, also of the last, which no step's record can tell of.
            logger.info(_report(result))
            self._last = result
            if on_served is not None:
                on_served()
        except Exception as error:
            self._on_failure(error)
            raise
        return result


def _report(published: PublishResult) -> str:
    diff = published.canary_diff
    canary = "" if diff is None else f", canary {diff:.3g} nats a token in {published.canary_s:.3f} s"
    return (
        f"policy version {published.policy_version} is served: push {published.push_s:.3f} s, "
        f"pull {published.pull_s:.3f} s{canary}"
    )
