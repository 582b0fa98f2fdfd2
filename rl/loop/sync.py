"""Push weights and let generators pull them, in the background, one version at a time.

begin            after the last optimizer step of a loop's step: the trainer pushes, while it
                 computes the next gradient if the loop may be off-policy
wait_for_push    before an optimizer step changes the weights that are still being copied
wait_for_pull    before the next push, before an evaluation, and at the end of a run
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rl.protocols import Publisher
from rl.types import PublishResult
from rl.utils.clock import now_s

logger = logging.getLogger(__name__)

MUCH_LOST = 0.5
"""Share of an update that rounding loses from which a run warns."""


class WeightSync:
    """Background publisher of the trainer's weights.

    Example:
        await sync.begin()          # version 7 is on its way
        await trainer.forward_backward(samples)
        await sync.wait_for_push()  # before the weights change
        await trainer.optim_step()
        await sync.begin()          # waits until version 7 is served, then pushes version 8
    """

    def __init__(
        self, publisher: Publisher, *, on_failure: Callable[[BaseException], None]
    ) -> None:
        """`on_failure` receives an error as soon as it occurs; every wait raises it too."""
        self._publisher = publisher
        self._on_failure = on_failure
        self._push: asyncio.Task[int] | None = None
        self._pull: asyncio.Task[PublishResult] | None = None
        self._last: PublishResult | None = None
        self._has_warned = False

    @property
    def last(self) -> PublishResult:
        """Result of the newest version that is served."""
        assert self._last is not None, "nothing was published"
        return self._last

    async def begin(self, on_pulled: Callable[[], None] | None = None) -> None:
        """Wait until the version before is served, then start to publish the current weights.

        `on_pulled` is called when all generators serve them.
        """
        # One version at a time: besides the versions that are kept the store has room for one.
        if self._pull is not None:
            await self.wait_for_pull()
        self._push = asyncio.create_task(self._publisher.push(), name="push of weights")
        self._pull = asyncio.create_task(
            self._pull_after(self._push, on_pulled), name="pull of weights"
        )
        # Send the push before the caller asks the trainer for anything else: a push that is queued
        # behind a gradient starts late by the time of that gradient.
        await asyncio.sleep(0)

    async def wait_for_push(self) -> None:
        """Wait until the trainer may change its weights."""
        # Shielded here and below: a stop that cancels the waiting loop must not cut off a push.
        if self._push is not None:
            await asyncio.shield(self._push)

    async def wait_for_pull(self) -> PublishResult:
        """Wait until every generator serves the version that was begun last."""
        assert self._pull is not None, "nothing was published"
        return await asyncio.shield(self._pull)

    async def close(self) -> None:
        """Cancel the push and the pull in progress. Idempotent."""
        tasks = [task for task in (self._push, self._pull) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pull_after(
        self, push: asyncio.Task[int], on_pulled: Callable[[], None] | None
    ) -> PublishResult:
        started = now_s()
        try:
            version = await push
            push_s = now_s() - started
            checked = await self._publisher.pull(version)
            result = self._last = PublishResult(
                policy_version=version,
                push_s=push_s,
                pull_s=now_s() - started - push_s - checked.parity_s,
                parity_diff=checked.parity_diff,
                parity_s=checked.parity_s,
                num_bytes=checked.num_bytes,
                merge_lost=checked.merge_lost,
            )
            parity = ""
            if checked.parity_diff is not None:
                parity = (
                    f", parity {checked.parity_diff:.3g} nats a token in {checked.parity_s:.3f} s"
                )
            # Logged for the last version too, which no step's record contains.
            logger.info(
                "policy version %d is served: push %.3f s, pull %.3f s%s",
                version,
                push_s,
                result.pull_s,
                parity,
            )
            self._warn_of_merge(result)
            if on_pulled is not None:
                on_pulled()
        except Exception as error:
            # The loop may be waiting for a batch, which newer weights would have let start.
            self._on_failure(error)
            raise
        return result

    def _warn_of_merge(self, result: PublishResult) -> None:
        # Once, as most versions after it would warn too.
        if self._has_warned or result.merge_lost is None or result.merge_lost <= MUCH_LOST:
            return
        self._has_warned = True
        logger.warning(
            "policy version %d: merged adapters lose %.2g of their update to rounding "
            "(sync/merge_lost, above %g), so generators sample from other weights than those in "
            "training: set merge=False in LoRA.Config, or let generators compute in float32",
            result.policy_version,
            result.merge_lost,
            MUCH_LOST,
        )
