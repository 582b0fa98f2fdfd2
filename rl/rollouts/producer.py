"""Groups of rollouts, made ahead of the steps that train on them.

    problems -> start (as the age bound allows) -> worker -> drop or keep -> next_batch

`RolloutProducer` starts a task for each group as soon as there is a place for it, in the task's order.
It is unblocked by `serve` (newer weights), by `next_batch` (places of a taken batch), and by a group that
is dropped. Whoever awaits `next_batch` is unblocked by finished groups, or by an error of any of them.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rl.errors import RunError
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
    """Since the batch before, in the task's order."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Held:
    """What a producer has between two batches, and another one goes on with."""

    finished: tuple[tuple[Group, int], ...] = ()
    """Groups that no batch has taken, each with its last step (`AgeBound`)."""
    dropped: tuple[tuple[DropReason, Group], ...] = ()
    """Since the last batch."""
    dropped_in_row: Mapping[DropReason, int] = field(default_factory=dict)
    num_scored: int = 0
    failures: tuple[str, ...] = ()
    """Both of rewards since the last batch."""


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
        held: Held | None = None,
    ) -> None:
        """
        Args:
            problems: with their numbers in the task's order, without those of finished groups in `held`.
            failed_rewards: of this producer alone.
            max_dropped: groups in a row that may be dropped; one more stops the run.
            held: of an earlier producer that is continued.
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
        if held is not None:
            self._take_over(held)

    def serve(self, step: int) -> None:
        """Every generator has the weights after `step`: more groups may start."""
        self.bound.serve(step)
        self._start_groups()

    def fail(self, error: BaseException) -> None:
        """Let `next_batch` raise this: something that it waits for will not come."""
        self._error = self._error or error
        self._changed.set()

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
        batch = Batch(groups=[self._finished.pop(n) for n in numbers], dropped=_in_order(self._dropped))
        self._dropped = []
        self._failed_rewards.clear()
        self._start_groups()
        return batch

    def unused(self) -> Batch:
        """What was finished or dropped since the last batch; after an error, to show what led to it."""
        groups = [self._finished[n] for n in sorted(self._finished)]
        return Batch(groups=groups, dropped=_in_order(self._dropped))

    def held(self) -> Held:
        """What there is now; of value between two batches."""
        # By another event loop's clock they were generated long ago.
        of_old = {n: replace(group, generated_at=-math.inf) for n, group in self._finished.items()}
        return Held(
            finished=tuple((of_old[n], self.bound.last_step(n)) for n in sorted(of_old)),
            dropped=tuple(_in_order(self._dropped)),
            dropped_in_row=dict(self._dropped_in_row),
            num_scored=self._failed_rewards.num_scored,
            failures=tuple(self._failed_rewards.failures),
        )

    def _take_over(self, held: Held) -> None:
        for group, last_step in held.finished:
            self._finished[group.number] = group
            self.bound.hold(group.number, last_step=last_step)
        self._dropped = list(held.dropped)
        self._dropped_in_row.update(held.dropped_in_row)
        self._failed_rewards.num_scored = held.num_scored
        self._failed_rewards.failures = list(held.failures)

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


def _in_order(dropped: Sequence[tuple[DropReason, Group]]) -> list[tuple[DropReason, Group]]:
    """By number, whatever finished first: sums over them are then the same in every run."""
    return sorted(dropped, key=lambda pair: pair[1].number)
