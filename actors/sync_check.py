"""Generators that pull a version, and the check that they hold and use what the trainer pushed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.calls import Group
from actors.canary import LogprobCanary
from rl.types import BoxSum
from rl.weights.canary import check_sums


class SyncCheck:
    """What every pull of a run is compared with: that of a new version, and that of who slept."""

    def __init__(self, canary: LogprobCanary | None, *, drains: bool = False) -> None:
        """
        Args:
            canary: None leaves it at the checksums.
            drains: a pull waits for completions that run, as long as these may take.
        """
        self.canary = canary
        self._pull_limit = "generate_s + sync_s" if drains else "sync_s"
        self._pushed: dict[int, _Pushed] = {}
        """By version: the one that is served, and one on its way."""

    def expect(self, version: int, *, sums: Sequence[BoxSum], logprobs_T: np.ndarray | None) -> None:
        """Remember what was pushed.

        Args:
            sums: of all ranks of the trainer.
            logprobs_T: the trainer's, of the canary, where there is one.
        """
        self._pushed[version] = _Pushed(sums=sums, logprobs_T=logprobs_T)

    async def pull(self, version: int, *, generators: Sequence[Group]) -> float | None:
        """Every generator pulls, and is checked.

        Returns:
            As `LogprobCanary.check`; None without a canary.

        Raises:
            WeightCanaryError: names generator, tensor and version.
            CanaryError: names generator and version.
        """
        assert version in self._pushed, f"version {version} was not pushed; there are {[*self._pushed]}"
        pulls = await asyncio.gather(
            *(g.call("pull_model_state_dict", version, limit=self._pull_limit) for g in generators)
        )
        pulled = {
            generator.name: [s for rank in ranks for s in rank.sums]
            for generator, ranks in zip(generators, pulls, strict=True)
        }
        check_sums(version=version, pushed=self._pushed[version].sums, pulled=pulled)
        diff = await self._compare(version, generators)
        self._pushed = {number: pushed for number, pushed in self._pushed.items() if number >= version}
        return diff

    async def _compare(self, version: int, generators: Sequence[Group]) -> float | None:
        expected_T = self._pushed[version].logprobs_T
        if self.canary is None or expected_T is None:
            return None
        answers = await asyncio.gather(
            *(g.call("compute_logprobs", [self.canary.token_ids], limit="generate_s") for g in generators)
        )
        found = {g.name: ranks[0][0] for g, ranks in zip(generators, answers, strict=True)}
        return self.canary.check(policy_version=version, expected_T=expected_T, found=found)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pushed:
    sums: Sequence[BoxSum]
    logprobs_T: np.ndarray | None
