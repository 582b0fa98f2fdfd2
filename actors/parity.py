"""Checks after every sync that generators hold the trainer's weights and compute as the trainer does.

Weight parity compares checksums: the bits have arrived. Logprob parity compares logprobs of a fixed text: the
generator uses these bits, in the right layout and dtype, and no cached key of older weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.calls import ActorLostError, Group
from rl.rollouts.renderer import Renderer
from rl.rollouts.samples import demonstration_sample
from rl.types import BoxSum, Prompt, ServeResult, TrainingSample
from rl.utils.clock import now_s
from rl.weights.checksum import check_sums
from rl.weights.types import WeightStoreError

if TYPE_CHECKING:
    from actors.config import ParityConfig

BOUNDS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}
"""Mean difference in nats a token, by the coarser of the two compute dtypes: a few times the rounding."""


class LogprobParityError(WeightStoreError):
    """A generator's logprobs differ from the trainer's with the weights of one version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityText:
    """A fixed text and the largest accepted difference of its logprobs."""

    token_ids: np.ndarray
    """[T] int32."""
    max_diff: float
    """Bound of the mean difference in nats a token."""

    @property
    def sample(self) -> TrainingSample:
        """The text as the trainer takes it."""
        return demonstration_sample(self.token_ids[:1], self.token_ids[1:])

    def check(self, *, policy_version: int, expected_T: np.ndarray, found: Mapping[str, np.ndarray]) -> float:
        """Return the largest mean difference of a generator, in nats a token.

        Args:
            expected_T: the trainer's logprobs, [T] float32; entry 0 belongs to no token.
            found: each generator's logprobs, by name.

        Raises:
            LogprobParityError: names generator, version, the difference and the bound.
        """
        diffs = {name: np.abs(logprobs_T - expected_T)[1:] for name, logprobs_T in found.items()}
        for name, diff in diffs.items():
            if not float(diff.mean()) <= self.max_diff:
                raise LogprobParityError(
                    f"logprob parity: with policy version {policy_version} {name} differs from the trainer by "
                    f"{float(diff.mean()):.3g} nats a token on a fixed text of {len(self.token_ids)} tokens, "
                    f"more than {self.max_diff:g} (parity.max_logprob_diff)"
                )
        return max(float(diff.mean()) for diff in diffs.values())


def make_parity_text(
    config: ParityConfig,
    *,
    prompt: Prompt,
    renderer: Renderer,
    dtypes: tuple[str, ...],
    max_tokens: int,
    batch_invariant: bool = False,
) -> ParityText | None:
    """Return the text of a run, or None if `config` turns the comparison off.

    Args:
        prompt: the text is this prompt with its problem's answer.
        dtypes: compute dtypes of trainer and generator.
        max_tokens: longest text that both accept.
    """
    if not config.enable:
        return None
    problem = prompt.problem
    answer = renderer.reply((problem.demonstrations or (problem.answer,))[0])[:-1]
    token_ids = np.concatenate([prompt.token_ids, answer])
    # The end of the text: a policy has learnt most about the answer.
    kept = token_ids[-min(config.num_tokens, max_tokens) :]
    bound = config.max_logprob_diff
    if bound is None:
        bound = 0.0 if batch_invariant else max(BOUNDS[dtype] for dtype in dtypes)
    return ParityText(token_ids=kept, max_diff=bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pushed:
    sums: Sequence[BoxSum]
    expected: asyncio.Future[list[Any]] | None
    """The trainer's logprobs of the text."""


class ParityCheck:
    """Pulls of a run's generators, each checked against what the trainer pushed."""

    def __init__(self, text: ParityText | None, *, drains: bool = False, keeps: bool = False) -> None:
        """
        Args:
            text: None compares checksums only.
            drains: a pull first waits for running completions.
            keeps: older versions may be pulled again, until `drop`.
        """
        self.text = text
        self._drains = drains
        self.keeps = keeps
        self._pushed: dict[int, _Pushed] = {}
        """The version that is served and the next one, or all that are kept, by version."""

    def expect(
        self, version: int, *, sums: Sequence[BoxSum], expected: asyncio.Future[list[Any]] | None
    ) -> None:
        """Remember what was pushed.

        Args:
            sums: checksums of all ranks of the trainer.
            expected: the trainer's logprobs of the text, requested with the push; None without a text.
        """
        self._pushed[version] = _Pushed(sums=sums, expected=expected)

    def forget(self) -> None:
        """Forget all versions after the loss of the trainer: a version may return with other weights."""
        for pushed in self._pushed.values():
            if pushed.expected is not None:
                pushed.expected.cancel()
        self._pushed = {}

    def drop(self, version: int) -> None:
        """Forget one version."""
        self._pushed.pop(version, None)

    async def pull(
        self, version: int, *, generators: Sequence[Group]
    ) -> tuple[ServeResult, Sequence[ActorLostError]]:
        """Let every generator pull the version, and check each; also return the errors of lost generators.

        Raises:
            WeightParityError: names generator, tensor and version.
            LogprobParityError: names generator and version.
        """
        assert version in self._pushed, f"version {version} was not pushed; there are {[*self._pushed]}"
        pushed = self._pushed[version]
        if pushed.expected is not None and pushed.expected.cancelled():
            raise WeightStoreError(f"policy version {version} was given up: an earlier pull of it has failed")
        try:
            calls = []
            for g in generators:
                extra_s = g.timeouts.generate_s if self._drains else 0.0
                calls.append((g, g.call("pull_model_state_dict", version, extra_s=extra_s)))
            answers, lost = await _answers(calls)
            pulled = {g.name: [s for rank in ranks for s in rank.sums] for g, ranks in answers}
            check_sums(version=version, pushed=pushed.sums, pulled=pulled)
            started = now_s()
            diff, lost_later = await self._compare(version, pushed, [g for g, _ in answers])
            parity_s = now_s() - started
        except BaseException:
            if pushed.expected is not None:
                await give_up(pushed.expected)
            raise
        if not self.keeps:
            self._pushed = {number: other for number, other in self._pushed.items() if number >= version}
        return ServeResult(canary_diff=diff, canary_s=parity_s), [*lost, *lost_later]

    async def _compare(
        self, version: int, pushed: _Pushed, generators: Sequence[Group]
    ) -> tuple[float | None, list[ActorLostError]]:
        if self.text is None or pushed.expected is None:
            return None, []
        # The trainer's logprobs first, as trainer and generators may have to take turns on a device.
        logprobs_T = (await pushed.expected)[0][0]
        tokens = [self.text.token_ids]
        answers, lost = await _answers([(g, g.call("compute_logprobs", tokens)) for g in generators])
        found = {g.name: ranks[0][0] for g, ranks in answers}
        if not found:
            return None, lost
        return self.text.check(policy_version=version, expected_T=logprobs_T, found=found), lost


async def _answers(
    calls: Sequence[tuple[Group, Coroutine[Any, Any, list[Any]]]],
) -> tuple[list[tuple[Group, list[Any]]], list[ActorLostError]]:
    """Await all calls and return the answers with their groups, and the errors of groups that were lost."""

    async def answer_of(call: Coroutine[Any, Any, list[Any]]) -> list[Any] | ActorLostError:
        try:
            return await call
        except ActorLostError as error:
            return error

    results = await asyncio.gather(*(answer_of(call) for _, call in calls))
    answers = [
        (group, result)
        for (group, _), result in zip(calls, results, strict=True)
        if not isinstance(result, ActorLostError)
    ]
    return answers, [result for result in results if isinstance(result, ActorLostError)]


async def give_up(answer: asyncio.Future[list[Any]]) -> None:
    """Cancel an answer that is no longer needed, and ignore its error."""
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
