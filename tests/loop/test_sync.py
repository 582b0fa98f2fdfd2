"""Results of a published version, and the warning of what a merge lost."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rl.loop.sync import WeightSync
from rl.types import PullResult


@dataclass
class MergingPublisher:
    """Publisher whose versions have lost these shares of the adapters' update."""

    merge_lost: Sequence[float | None]
    version: int = -1

    async def push(self) -> int:
        self.version += 1
        return self.version

    async def pull(self, policy_version: int) -> PullResult:
        return PullResult(merge_lost=self.merge_lost[policy_version])


def publish_all(merge_lost):
    """Return the results of all versions."""

    async def main():
        sync = WeightSync(MergingPublisher(merge_lost), on_failure=lambda error: None)
        results = []
        for _ in merge_lost:
            await sync.begin()
            results.append(await sync.wait_for_pull())
        return results

    return asyncio.run(main())


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def test_first_version_that_loses_most_of_its_update_warns(caplog):
    results = publish_all([0.0, 0.5, 0.875, 0.9])
    assert [result.merge_lost for result in results] == [0.0, 0.5, 0.875, 0.9]
    (message,) = warnings_of(caplog)
    assert "policy version 2" in message
    assert "lose 0.88 of their update" in message
    assert "merge=False" in message


def test_version_without_merged_adapters_does_not_warn(caplog):
    (result,) = publish_all([None])
    assert result.merge_lost is None
    assert warnings_of(caplog) == []
