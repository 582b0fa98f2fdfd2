"""Groups of rollouts, made ahead of the steps that train on them.

    problems -> start (as the age bound allows) -> worker -> drop or keep -> next_batch

`RolloutProducer` starts a task for each group as soon as there is a place for it, in the task's order.
It is unblocked by `serve` (newer weights), by `next_batch` (places of a taken batch), and by a group that
is dropped. Whoever awaits `next_batch` is unblocked by finished groups, or by an error of any of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rl.errors import RunError
from rl.observability.activity import during
from rl.rollouts.age_bound import AgeBound
from rl.rollouts.grading import equal_rewards
from rl.rollouts.group import Group
from rl.types import Problem, Score

DropReason = Literal["failed", "equal", "oversize", "long_prompt"]


class NothingToLearnError(RunError):
    """Too many steps, or groups, in a row from which there is nothing to learn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFilter:
    """Which finished groups are not trained on."""

    drop_equal: bool
    """Those without policy gradient."""
    max_sample_tokens: int | None
    """Those with a longer sample, prompt included; None: no limit."""

    def reason_to_drop(self, group: Group) -> DropReason | None:
        if not group.rollouts:
            return "long_prompt"
        if not group.scored:
            return "failed"
        longest = max(rollout.num_tokens for rollout in group.rollouts)
        if self.max_sample_tokens is not None and longest > self.max_sample_tokens:
            return "oversize"
        return "equal" if self.drop_equal and equal_rewards(group.scored) else None


@dataclass(kw_only=True, slots=True)
class FailedRewards:
    """Counts rewards that could not be computed, and stops a run in which they are too many."""

    max_share: float
    """Of the rewards since the last batch."""
    rewards_of_step: int
    """The share is of at least as many, so that it means the same at a batch's first rewards."""
    num_scored: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, scores: Sequence[Score]) -> None:
        """Raises RunError, which shows the first failure, if there are too many now."""
        self.num_scored += len(scores)
        self.failures += [s.failure for s in scores if s.failure is not None]
        num_rewards = max(self.num_scored, self.rewards_of_step)
        # The quotient, as 0.29 * 100 is less than 29.
        if len(self.failures) / num_rewards > self.max_share:
            raise RunError(
                f"{len(self.failures)} of {self.num_scored} rewards failed since the last batch, where "
                f"loop.max_failed_rewards={self.max_share:g} allows that share of these or, if there are "
                f"fewer, of a step's {self.rewards_of_step}; the first: {self.failures[0]}"
            )

    def clear(self) -> None:
        """A batch was taken."""
        self.num_scored, self.failures = 0, []


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """What one step consumes."""

    groups: list[Group]
    """[P], in the order they were started."""
    dropped: list[tuple[DropReason, Group]]
    """Since the batch before."""


class RolloutProducer:
    """Runs groups concurrently, as many as the bound has places for."""

    def __init__(
        self,
        *,
        bound: AgeBound,
        worker: Callable[[int, Problem], Awaitable[Group]],
        problems: Iterator[tuple[int, Problem]],
        group_filter: GroupFilter,
        failed_rewards: FailedRewards,
        max_dropped: int,
    ) -> None:
        """
        Args:
            problems: with their numbers in the task's order.
            failed_rewards: of this producer alone.
            max_dropped: groups in a row that may be dropped; one more stops the run.
        """
        self.bound = bound
        self._worker = worker
        self._problems = problems
        self._filter = group_filter
        self._failed_rewards = failed_rewards
        self._max_dropped = max_dropped
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: dict[int, Group] = {}
        self._dropped: list[tuple[DropReason, Group]] = []
        self._dropped_in_row: Counter[DropReason] = Counter()
        self._used_up = False
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    def serve(self, step: int) -> None:
        """Every generator has the weights after `step`: more groups may start."""
        self.bound.serve(step)
        self._start_groups()

    def fail(self, error: BaseException) -> None:
        """Let `next_batch` raise this: something that it waits for will not come."""
        self._error = self._error or error
        self._changed.set()

    @during("waits for a batch")
    async def next_batch(self) -> Batch:
        """The groups of the next step; waits until there are enough of them.

        Raises:
            RunError: the problems are used up, or too many rewards failed.
            NothingToLearnError: too many groups in a row were dropped.
            Exception: what a worker raised.
        """
        while True:
            if self._error is not None:
                raise self._error
            self._start_groups()
            numbers = self.bound.take(self._finished.keys())
            if numbers is not None:
                break
            self._check_used_up()
            self._changed.clear()
            await self._changed.wait()
        batch = Batch(groups=[self._finished.pop(n) for n in numbers], dropped=self._dropped)
        self._dropped = []
        self._failed_rewards.clear()
        self._start_groups()
        return batch

    def unused(self) -> Batch:
        """What was finished or dropped since the last batch; after an error, to show what led to it."""
        return Batch(groups=[self._finished[n] for n in sorted(self._finished)], dropped=self._dropped)

    async def close(self) -> None:
        """End what is under way. Idempotent."""
        self._error = self._error or asyncio.CancelledError()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_groups(self) -> None:
        while self._error is None and not self._used_up and self.bound.may_start():
            numbered = next(self._problems, None)
            if numbered is None:
                self._used_up = True
                self._changed.set()
                return
            number, problem = numbered
            self.bound.start(number)
            task = asyncio.create_task(self._run(number, problem), name=f"rollouts of {problem.id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, number: int, problem: Problem) -> None:
        try:
            group = await self._worker(number, problem)
            self._settle(group)
        except asyncio.CancelledError as error:
            if self._error is None:  # not `close`: nobody would ever learn of it
                cancelled = RunError(
                    f"the rollouts of problem {problem.id!r} were cancelled by their own code"
                )
                cancelled.__cause__ = error
                self.fail(cancelled)
            raise
        except Exception as error:  # noqa: BLE001  (raised where the loop waits)
            self.fail(error)

    def _settle(self, group: Group) -> None:
        """A group is finished: keep or drop it."""
        try:
            self._failed_rewards.add(group.scores)
        except RunError:
            self._finished[group.number] = group  # for `unused`: no batch is taken any more
            raise
        reason = self._filter.reason_to_drop(group)
        if reason is None:
            self._finished[group.number] = group
            self._dropped_in_row.clear()
        else:
            self._dropped.append((reason, group))
            self._dropped_in_row[reason] += 1
            self.bound.release(group.number)
            self._stop_if_all_are_dropped()
            self._start_groups()
        self._changed.set()

    def _stop_if_all_are_dropped(self) -> None:
        count = self._dropped_in_row.total()
        if count > self._max_dropped:
            reasons = ", ".join(f"{n} {reason}" for reason, n in self._dropped_in_row.items())
            raise NothingToLearnError(
                f"{count} groups in a row could not be trained on ({reasons}), more than the "
                f"{self._max_dropped} of loop.max_empty_steps times loop.num_prompts: the task is solved or "
                "out of reach, or its replies do not fit"
            )

    def _check_used_up(self) -> None:
        num_left, needed = len(self.bound.outstanding), self.bound.num_prompts
        if self._used_up and num_left < needed:
            raise RunError(
                f"the task's training problems are used up: {num_left} are left, of loop.num_prompts="
                f"{needed} that a step takes; let `train_problems` repeat them, or lower loop.num_steps"
            )
