"""Generators that pull a version, and the check that they hold and use what the trainer pushed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from actors.calls import ActorLostError, Group
from actors.canary import LogprobCanary
from rl.clock import now_s
from rl.types import BoxSum, ServeResult
from rl.weights.canary import check_sums
from rl.weights.errors import WeightStoreError


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

    def forget(self) -> None:
        """What was pushed is lost with the trainer; its version may come again with other weights."""
        for pushed in self._pushed.values():
            if pushed.expected is not None:
                pushed.expected.cancel()
        self._pushed = {}

    async def pull(
        self, version: int, *, generators: Sequence[Group], lost: list[ActorLostError] | None = None
    ) -> ServeResult:
        """Every generator pulls, and is checked.

        Args:
            lost: takes the errors of generators that are lost meanwhile, which then are left out. None: such
                an error is raised, as any other.

        Raises:
            WeightCanaryError: names generator, tensor and version.
            CanaryError: names generator and version.
        """
        assert version in self._pushed, f"version {version} was not pushed; there are {[*self._pushed]}"
        pushed = self._pushed[version]
        if pushed.expected is not None and pushed.expected.cancelled():
            raise WeightStoreError(f"policy version {version} was given up: a pull of it has failed before")
        try:
            pulled = await pull_checked(
                version, sums=pushed.sums, generators=generators, limit=self._pull_limit, lost=lost
            )
            started = now_s()
            diff = await self._compare(version, pushed, pulled, lost)
            canary_s = now_s() - started
        except BaseException:
            if pushed.expected is not None:
                await give_up(pushed.expected)
            raise
        self._pushed = {number: other for number, other in self._pushed.items() if number >= version}
        return ServeResult(canary_diff=diff, canary_s=canary_s)

    async def _compare(
        self,
        version: int,
        pushed: _Pushed,
        generators: Sequence[Group],
        lost: list[ActorLostError] | None,
    ) -> float | None:
        if self.canary is None or pushed.expected is None:
            return None
        # The trainer's comes first, also where the two take turns.
        logprobs_T = (await pushed.expected)[0][0]
        tokens = [self.canary.token_ids]
        asked = [(g, g.call("compute_logprobs", tokens, limit="generate_s")) for g in generators]
        found = {g.name: ranks[0][0] for g, ranks in await _of_the_living(asked, lost)}
        if not found:
            return None
        return self.canary.check(policy_version=version, expected_T=logprobs_T, found=found)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pushed:
    """What generators are compared with."""

    sums: Sequence[BoxSum]
    expected: asyncio.Future[list[Any]] | None


async def pull_checked(
    version: int,
    *,
    sums: Sequence[BoxSum],
    generators: Sequence[Group],
    limit: str,
    lost: list[ActorLostError] | None = None,
) -> list[Group]:
    """Every generator pulls, and what it then holds is compared with the sums of what was pushed.

    `lost` is as of `SyncCheck.pull`; returns those that were not.

    Raises:
        WeightCanaryError: names generator, tensor and version.
    """
    asked = [(g, g.call("pull_model_state_dict", version, limit=limit)) for g in generators]
    pulls = await _of_the_living(asked, lost)
    pulled = {generator.name: [s for rank in ranks for s in rank.sums] for generator, ranks in pulls}
    check_sums(version=version, pushed=sums, pulled=pulled)
    return [generator for generator, _ in pulls]


async def _of_the_living(
    asked: Sequence[tuple[Group, Coroutine[Any, Any, list[Any]]]], lost: list[ActorLostError] | None
) -> list[tuple[Group, list[Any]]]:
    """The answers; without those that are lost meanwhile, whose errors `lost` takes, if it is not None."""

    async def answer_of(answer: Coroutine[Any, Any, list[Any]]) -> list[Any] | None:
        try:
            return await answer
        except ActorLostError as error:
            if lost is None:
                raise
            lost.append(error)
            return None

    answers = await asyncio.gather(*(answer_of(answer) for _, answer in asked))
    pairs = zip((group for group, _ in asked), answers, strict=True)
    return [(group, answer) for group, answer in pairs if answer is not None]


async def give_up(answer: asyncio.Future[list[Any]]) -> None:
    """Nobody waits for it any more, nor for its error."""
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
