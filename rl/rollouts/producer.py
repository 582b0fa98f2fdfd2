"""Groups of rollouts, produced ahead of the steps that train on them.

    problems -> start (as the staleness bound allows) -> worker -> drop or keep -> take_batch

New groups start after `record_pull` (newer weights), after `take_batch` (places of a taken batch),
and after a dropped group. `take_batch` waits for finished groups, or for an error of any of them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rl.observability.spans import span
from rl.rollouts.bundles import EpisodeRoom
from rl.rollouts.group import Group, check_failures, has_equal_rewards
from rl.rollouts.staleness import StalenessBound
from rl.types import LoopPosition, Problem
from rl.utils.errors import RunError
from rl.utils.printing import describe_value

DropReason = Literal["failed", "equal", "oversize", "long_prompt"]


class NothingToLearnError(RunError):
    """Too many steps, or groups, in a row without anything to learn from."""


class NumberedProblems:
    """Iterator over training problems and their numbers, from 0, in the task's order.

    Continued from a position, it first gives the problems that were outstanding there. A source
    without a method `problem(number)` is drawn again from the beginning.
    """

    def __init__(self, problems: Iterator[Problem], position: LoopPosition | None = None) -> None:
        self.num_drawn = 0 if position is None else position.num_problems
        """Problems drawn from the task so far, outstanding ones included."""
        self._again = set() if position is None else set(position.outstanding)
        """Outstanding problems of the position that were not given again yet."""
        self._numbered = self._continue(problems)

    def _continue(self, problems: Iterator[Problem]) -> Iterator[tuple[int, Problem]]:
        """Yield the outstanding problems of the position, then those from `num_drawn` on."""
        # Copies, because both change as problems are given.
        num_before, again = self.num_drawn, sorted(self._again)
        problem_at = getattr(problems, "problem", None)
        if problem_at is not None:
            for number in itertools.chain(again, itertools.count(num_before)):
                yield number, problem_at(number)
        else:
            for number, problem in enumerate(problems):
                if number >= num_before or number in again:
                    yield number, problem

    @property
    def again(self) -> tuple[int, ...]:
        """Numbers of the position's outstanding problems that were not given again yet."""
        return tuple(sorted(self._again))

    def __iter__(self) -> Iterator[tuple[int, Problem]]:
        return self

    def __next__(self) -> tuple[int, Problem]:
        number, problem = next(self._numbered)
        self._again.discard(number)
        self.num_drawn = max(self.num_drawn, number + 1)
        return number, problem

    def make_position(self, step: int, *, outstanding: Collection[int]) -> LoopPosition:
        """Return the position after `step`, given the numbers that were drawn and not used."""
        outstanding = tuple(sorted(self._again.union(outstanding)))
        return LoopPosition(step=step, num_problems=self.num_drawn, outstanding=outstanding)


def find_reason_to_drop(
    group: Group,
    *,
    drop_equal: bool,
    max_sample_tokens: int | None,
    room: EpisodeRoom | None = None,
) -> DropReason | None:
    """Return why a finished group is not trained on, or None; settings as in `RolloutProducer`."""
    if not group.rollouts:
        return "failed" if group.is_refused else "long_prompt"
    if not group.scored:
        return "failed"
    if max_sample_tokens is not None or room is not None:
        for rollout in group.rollouts:
            row_tokens = rollout.row_tokens
            if max_sample_tokens is not None and max(row_tokens, default=0) > max_sample_tokens:
                return "oversize"
            if room is not None and not room.holds(row_tokens):
                return "oversize"
    return "equal" if drop_equal and has_equal_rewards(group.scored) else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """The groups that one step consumes."""

    groups: list[Group]
    """[P], in the order they were started."""
    dropped: list[tuple[DropReason, Group]]
    """Groups dropped since the previous batch, in the task's order."""


@dataclass(kw_only=True, eq=False)
class RolloutProducer:
    """Runs as many groups concurrently as the bound allows.

    Its collaborators belong to it alone.
    """

    bound: StalenessBound
    worker: Callable[[int, Problem], Awaitable[Group]]
    problems: Iterator[tuple[int, Problem]]
    """Problems with their numbers."""
    drop_equal: bool
    """Drop groups without policy gradient."""
    max_sample_tokens: int | None
    """Drop groups with a longer sample, prompt included; None: no limit."""
    room: EpisodeRoom | None = None
    """Drop groups with an episode whose rows do not fit together; None: they need not."""
    max_dropped: int
    """Most groups in a row that may be dropped; one more stops the run."""
    max_failed_rewards: float
    """Largest share of failed rewards since the last batch."""
    rewards_per_step: int
    """Smallest number that the share is taken of, so that a batch's first failure does not count as
    all of it.
    """

    def __post_init__(self) -> None:
        self._num_scored = 0
        """Scores since the last batch."""
        self._failures: list[str] = []
        """Failed ones among them."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: dict[int, Group] = {}
        self._dropped: list[tuple[DropReason, Group]] = []
        self._dropped_in_row: Counter[DropReason] = Counter()
        self._used_up = False
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    def record_pull(self, step: int) -> None:
        """Record that every generator has the weights after `step`, and start groups."""
        self.bound.record_pull(step)
        self._start_groups()

    def fail(self, error: BaseException) -> None:
        """Let `take_batch` raise this error."""
        self._error = self._error or error
        self._changed.set()

    @span("waits for a batch")
    async def take_batch(self) -> Batch:
        """Wait for the groups of the next step and return them.

        Raises:
            RunError: the problems are used up, or too many rewards failed.
            NothingToLearnError: too many groups in a row were dropped.
            Exception: raised by a worker.
        """
        while True:
            if self._error is not None:
                raise self._error
            self._start_groups()
            numbers = self.bound.take()
            if numbers is not None:
                break
            # Waits for a worker that finishes, for `fail`, or for the end of the problems; each of
            # them sets the event after what it changed.
            self._check_used_up()
            self._changed.clear()
            await self._changed.wait()
        groups = [self._finished.pop(number) for number in numbers]
        batch = Batch(groups=groups, dropped=_sort_by_number(self._dropped))
        self._dropped = []
        self._num_scored, self._failures = 0, []
        # The batch's places are free, so that new groups are drawn while the step trains.
        self._start_groups()
        return batch

    def collect_unused(self) -> Batch:
        """Return the groups that finished or were dropped since the last batch.

        They explain an error.
        """
        groups = [self._finished[n] for n in sorted(self._finished)]
        return Batch(groups=groups, dropped=_sort_by_number(self._dropped))

    @property
    def outstanding(self) -> list[int]:
        """Numbers of the groups that no batch has taken, those that were dropped since the last
        batch included.
        """
        return [*self.bound.outstanding, *(group.number for _, group in self._dropped)]

    async def close(self) -> None:
        """Cancel the groups under way. Idempotent."""
        # Before the tasks end: `_run` then takes their cancellation for the wanted one.
        self._error = self._error or asyncio.CancelledError()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_groups(self) -> None:
        while self._error is None and not self._used_up and self.bound.may_start():
            numbered = next(self.problems, None)
            if numbered is None:
                self._used_up = True
                self._changed.set()
                return
            number, problem = numbered
            self.bound.start(number)
            task = asyncio.create_task(self._run(number, problem), name=f"rollouts of {problem.id}")
            # The event loop itself keeps only weak references to tasks.
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, number: int, problem: Problem) -> None:
        try:
            group = await self.worker(number, problem)
            self._record(group)
        except asyncio.CancelledError:
            if self._error is None:  # cancelled by its own code, not by `close`
                self.fail(
                    RunError(
                        f"the rollouts of problem {describe_value(problem.id)} were cancelled by "
                        "their own code"
                    )
                )
            raise
        except Exception as error:  # noqa: BLE001  (raised by `take_batch`)
            self.fail(error)

    def _record(self, group: Group) -> None:
        """Keep or drop a finished group.

        Raises RunError if too many rewards failed or too many groups are dropped.
        """
        self._finished[group.number] = group
        self._num_scored += len(group.scores)
        for score in group.scores:
            if score.failure is not None:
                self._failures.append(score.failure)
        check_failures(
            self._failures,
            num_scored=self._num_scored,
            out_of=max(self._num_scored, self.rewards_per_step),
            max_share=self.max_failed_rewards,
            where="since the last batch",
        )
        reason = find_reason_to_drop(
            group,
            drop_equal=self.drop_equal,
            max_sample_tokens=self.max_sample_tokens,
            room=self.room,
        )
        if reason is None:
            self.bound.finish(group.number)
            self._dropped_in_row.clear()
        else:
            # Kept until the next batch: for its metrics, and because a resumed run draws it again.
            self._dropped.append((reason, self._finished.pop(group.number)))
            self._dropped_in_row[reason] += 1
            self.bound.release(group.number)
            count = self._dropped_in_row.total()
            if count > self.max_dropped:
                reasons = ", ".join(f"{n} {reason}" for reason, n in self._dropped_in_row.items())
                raise NothingToLearnError(
                    f"{count} groups in a row could not be trained on ({reasons}), more than the "
                    f"{self.max_dropped} of loop.max_empty_steps times loop.groups_per_batch: the "
                    "task is solved or out of reach, or its replies do not fit"
                )
            self._start_groups()
        self._changed.set()

    def _check_used_up(self) -> None:
        num_left, needed = len(self.bound.outstanding), self.bound.groups_per_batch
        if self._used_up and num_left < needed:
            raise RunError(
                f"the task's training problems are used up: {num_left} are left, but a step takes "
                f"loop.groups_per_batch={needed}; let `train_problems` repeat them, or lower "
                "loop.num_steps"
            )


def _sort_by_number(dropped: Sequence[tuple[DropReason, Group]]) -> list[tuple[DropReason, Group]]:
    """Sort by number rather than by time of finishing, so that sums are the same in every run."""
    return sorted(dropped, key=lambda pair: pair[1].number)
