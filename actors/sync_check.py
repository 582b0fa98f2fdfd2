"""Generators that pull a version, and the check that they hold and use what the trainer pushed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.calls import Group
from actors.canary import LogprobCanary
from rl.clock import now_s
from rl.types import BoxSum, ServeResult
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

    def expect(
        self, version: int, *, sums: Sequence[BoxSum], expected: asyncio.Future[list[Any]] | None
    ) -> None:
        """Remember what was pushed.

        Args:
            sums: of all ranks of the trainer.
            expected: the trainer's logprobs of the canary, under way since the push; None without one.
        """
        self._pushed[version] = _Pushed(sums=sums, expected=expected)

    async def pull(self, version: int, *, generators: Sequence[Group]) -> ServeResult:
        """Every generator pulls, and is checked.

        Raises:
            WeightCanaryError: names generator, tensor and version.
            CanaryError: names generator and version.
        """
        assert version in self._pushed, f"version {version} was not pushed; there are {[*self._pushed]}"
        pushed = self._pushed[version]
        try:
            await self._pull(version, pushed, generators)
            started = now_s()
            diff = await self._compare(version, pushed, generators)
            canary_s = now_s() - started
        except BaseException:
            if pushed.expected is not None:
                await give_up(pushed.expected)
            raise
        self._pushed = {number: other for number, other in self._pushed.items() if number >= version}
        return ServeResult(canary_diff=diff, canary_s=canary_s)

    async def _pull(self, version: int, pushed: _Pushed, generators: Sequence[Group]) -> None:
        """By every generator, whose checksums are compared."""
        await pull_checked(version, sums=pushed.sums, generators=generators, limit=self._pull_limit)

    async def _compare(self, version: int, pushed: _Pushed, generators: Sequence[Group]) -> float | None:
        if self.canary is None or pushed.expected is None:
            return None
        # The trainer's comes first, also where the two take turns.
        logprobs_T = (await pushed.expected)[0][0]
        answers = await asyncio.gather(
            *(g.call("compute_logprobs", [self.canary.token_ids], limit="generate_s") for g in generators)
        )
        found = {g.name: ranks[0][0] for g, ranks in zip(generators, answers, strict=True)}
        return self.canary.check(policy_version=version, expected_T=logprobs_T, found=found)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pushed:
    """What generators are compared with."""

    sums: Sequence[BoxSum]
    expected: asyncio.Future[list[Any]] | None


async def pull_checked(
    version: int, *, sums: Sequence[BoxSum], generators: Sequence[Group], limit: str
) -> None:
    """Every generator pulls, and what it then holds is compared with the sums of what was pushed.

    Raises:
        WeightCanaryError: names generator, tensor and version.
    """
    pulls = await asyncio.gather(*(g.call("pull_model_state_dict", version, limit=limit) for g in generators))
    pulled = {
        generator.name: [s for rank in ranks for s in rank.sums]
        for generator, ranks in zip(generators, pulls, strict=True)
    }
    check_sums(version=version, pushed=sums, pulled=pulled)


async def give_up(answer: asyncio.Future[list[Any]]) -> None:
    """Nobody waits for it any more, nor for its error."""
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
