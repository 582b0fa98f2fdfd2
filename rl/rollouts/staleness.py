"""Bounded staleness: how far generation may run ahead of training.

A step trains on P groups. Weights are counted in steps: those after step u are number u, and step r
trains weights r - 1. A token that weights u drew is r - 1 - u off-policy steps old when step r
trains on it.

A group that starts while every generator serves at least weights u may be taken by step
u + max_off_policy_steps + 1 at the latest: its `last_step`. With t steps taken, the outstanding
groups (started, not taken and not released) always satisfy

    (C)    for every e:  the number of groups with last_step <= e  is at most  (e - t) P

so if each step takes the P groups with the earliest last_step, none is ever too late.
docs/generation.md has the proof.

All decisions are made here. The callers are

    RolloutProducer   starts a group only if `StalenessBound.may_start`, and gives out the batch of
                      `StalenessBound.take`
    Loop              calls `StalenessBound.record_pull` (by the producer) when every generator has
                      pulled newer weights; `WeightVersions.record_push` for each version that is
                      pushed; and `WeightVersions.count_off_policy_steps` before it trains on a
                      batch

A token has the version of the weights that its engine held in the step that sampled it, so a
completion that is continued under newer weights has several.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from rl.rollouts.group import Group
from rl.types import Rollout
from rl.utils.errors import RunError


class StalePolicyError(RunError):
    """A token is older than the bound allows, or of weights that no generator should have."""


class StalenessBound:
    """Decides which groups may start, and which finished groups the next step takes."""

    def __init__(
        self, *, max_off_policy_steps: int, groups_per_batch: int, num_steps: int, step: int = 0
    ) -> None:
        """Bound a run of `num_steps` steps of `groups_per_batch` groups; `step` are done."""
        self.max_off_policy_steps = max_off_policy_steps
        self.groups_per_batch = groups_per_batch
        self.num_steps = num_steps
        self.num_taken = step
        self.served = step
        """Newest weights, counted in steps, that every generator serves."""
        self._last_steps: dict[int, int] = {}
        """Last step of each outstanding group, by its number."""
        # By last step, of which there are at most max_off_policy_steps + 1: so that a group that
        # finishes costs the same, however many are outstanding.
        self._num_outstanding: Counter[int] = Counter()
        self._finished: defaultdict[int, set[int]] = defaultdict(set)
        self._num_finished = 0

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Numbers of the groups that were started and neither taken nor released, in order."""
        return tuple(sorted(self._last_steps))

    def may_start(self) -> bool:
        """Return True if one more group fits into a step that the bound allows, up to the last."""
        # Invariant (C) for e = last_step; it holds for earlier e, to which no group is added.
        last_step = min(self.served + self.max_off_policy_steps + 1, self.num_steps)
        return len(self._last_steps) < (last_step - self.num_taken) * self.groups_per_batch

    def start(self, group: int) -> None:
        """Count a group as outstanding."""
        assert self.may_start(), f"group {group} may not start yet"
        assert group not in self._last_steps, f"group {group} has started before"
        last_step = self.served + self.max_off_policy_steps + 1
        self._last_steps[group] = last_step
        self._num_outstanding[last_step] += 1

    def finish(self, group: int) -> None:
        """Let a step take this group from now on."""
        self._finished[self._last_steps[group]].add(group)
        self._num_finished += 1

    def release(self, group: int) -> None:
        """Free the place of an unfinished group, which is not trained on."""
        self._remove(group)

    def record_pull(self, step: int) -> None:
        """Record that every generator now serves the weights after `step` or later ones."""
        assert step >= self.served, f"generators serve {self.served} and went back to {step}"
        self.served = step

    def take(self) -> list[int] | None:
        """Return the groups of the next step in the order of their start; None if it has to wait.

        The step waits for more groups to finish, or for an unfinished one that no later step could
        take in time.
        """
        if self._num_finished < self.groups_per_batch:
            return None
        step, room, num_left = self.num_taken + 1, self.groups_per_batch, 0
        groups: list[int] = []
        # The earliest last step first: a group that waits longer could become too late.
        for last_step in sorted(self._num_outstanding):
            num = min(room, len(self._finished[last_step]))
            room -= num
            # The groups left go to the steps that follow, P to each.
            num_left += self._num_outstanding[last_step] - num
            if num_left > (last_step - step) * self.groups_per_batch:
                return None
            groups += heapq.nsmallest(num, self._finished[last_step])
        for group in groups:
            self._finished[self._last_steps[group]].remove(group)
            self._remove(group)
        self._num_finished -= len(groups)
        self.num_taken = step
        return sorted(groups)

    def _remove(self, group: int) -> None:
        last_step = self._last_steps.pop(group)
        self._num_outstanding[last_step] -= 1
        if not self._num_outstanding[last_step]:
            del self._num_outstanding[last_step]
            self._finished.pop(last_step, None)


class WeightVersions:
    """Versions of the weights that steps may train on: a check of what the bound has promised.

    A generator that missed a push of weights would otherwise train the policy on stale tokens
    without a word.

    Example:
        >>> versions = WeightVersions(max_off_policy_steps=1)
        >>> versions.record_push(4, step=2)  # version 4 is what step 2 has made
        >>> versions.count_off_policy_steps(groups, step=3)  # of tokens that version 4 drew
        array([0, 0, 0])
    """

    def __init__(self, *, max_off_policy_steps: int) -> None:
        self.max_off_policy_steps = max_off_policy_steps
        self.step_of_version: dict[int, int] = {}
        """Step after which each version was pushed, of versions that a step may still train on."""

    def record_push(self, version: int, *, step: int) -> None:
        """Record that the weights after `step` were pushed as this version."""
        self.step_of_version[version] = step
        # A version that no step may train on any more is forgotten: a token of it is then refused.
        for old, pushed in list(self.step_of_version.items()):
            if step - pushed > self.max_off_policy_steps:
                del self.step_of_version[old]

    def count_off_policy_steps(self, groups: Sequence[Group], *, step: int) -> np.ndarray:
        """Return [trained tokens of all scored rollouts] int64: how many steps each is off-policy.

        The steps between the weights that drew a token and those that `step` trains.

        Raises:
            StalePolicyError: names the problem, the versions of its tokens and the allowed
                versions.
        """
        rollouts: list[Rollout] = []
        for group in groups:
            rollouts += [member.rollout for member in group.scored]
        versions = _join_versions(rollouts)

        # Step r trains weights r - 1, so a token of weights r - 1 is 0 steps off-policy.
        unknown = -1
        steps = np.full(len(versions), unknown, dtype=np.int64)
        allowed = []
        for version, pushed in self.step_of_version.items():
            num_steps = step - 1 - pushed
            if 0 <= num_steps <= self.max_off_policy_steps:
                allowed.append(version)
                steps[versions == version] = num_steps

        if (steps == unknown).any():
            self._raise_stale(groups, allowed=sorted(allowed), step=step)
        return steps

    def _raise_stale(self, groups: Sequence[Group], *, allowed: list[int], step: int) -> NoReturn:
        """Raise StalePolicyError for the first completion with a version that is not allowed."""
        for group in groups:
            for member in group.scored:
                versions = _join_versions([member.rollout])
                if np.isin(versions, allowed).all():
                    continue
                raise StalePolicyError(
                    f"a completion of problem {member.rollout.prompt.problem.id!r} was drawn by "
                    f"policy versions {np.unique(versions).tolist()}: with "
                    f"loop.max_off_policy_steps={self.max_off_policy_steps}, step {step} may train "
                    f"only on versions {allowed}: the weight sync is broken"
                )
        raise AssertionError("no completion is stale")


def _join_versions(rollouts: Sequence[Rollout]) -> np.ndarray:
    """Return the versions of the tokens of all trained turns; there may be none."""
    versions_of_turns = [np.zeros(0, dtype=np.int32)]
    for rollout in rollouts:
        versions_of_turns += [turn.completion.policy_versions for turn in rollout.trained_turns]
    return np.concatenate(versions_of_turns)
