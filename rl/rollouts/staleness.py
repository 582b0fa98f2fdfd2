"""Bounded staleness: how far generation may run ahead of training.

A step trains on P groups. Weights are counted in steps: those after step u are number u, and step r trains
weights r - 1. A token that weights u drew is r - 1 - u off-policy steps old when step r trains on it.

A group that starts while every generator serves at least weights u may be taken by step
u + max_off_policy_steps + 1 at the latest: its `last_step`. With t steps taken, the outstanding groups
(started, not taken and not released) always satisfy

    (C)    for every e:  the number of groups with last_step <= e  is at most  (e - t) P

so if each step takes the P groups with the earliest last_step, none is ever too late. docs/generation.md has the
proof.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from rl.rollouts.group import Group
from rl.utils.errors import RunError


class StalePolicyError(RunError):
    """A token is older than the bound allows, or comes from weights that no generator should have."""


class StalenessBound:
    """Decides which groups may start, and which finished groups the next step takes."""

    def __init__(
        self, *, max_off_policy_steps: int, groups_per_batch: int, num_steps: int, step: int = 0
    ) -> None:
        """Bound a run of `num_steps` steps that take `groups_per_batch` groups each; `step` are done."""
        self.max_off_policy_steps = max_off_policy_steps
        self.groups_per_batch = groups_per_batch
        self.num_steps = num_steps
        self.num_taken = step
        self.served = step
        """Newest weights, counted in steps, that every generator serves."""
        self._last_steps: dict[int, int] = {}
        """Last step of each outstanding group, by its number."""

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Numbers of the groups that were started and neither taken nor released, in order."""
        return tuple(sorted(self._last_steps))

    def may_start(self) -> bool:
        """Return True if one more group fits into a step that the bound allows, up to the last step."""
        last_step = min(self.served + self.max_off_policy_steps + 1, self.num_steps)
        return len(self._last_steps) < (last_step - self.num_taken) * self.groups_per_batch

    def start(self, group: int) -> None:
        """Count a group as outstanding."""
        assert self.may_start(), f"group {group} may not start yet"
        assert group not in self._last_steps, f"group {group} has started before"
        self._last_steps[group] = self.served + self.max_off_policy_steps + 1

    def release(self, group: int) -> None:
        """Free the place of a group that is not trained on."""
        del self._last_steps[group]

    def serve(self, step: int) -> None:
        """Record that every generator now serves the weights after `step` or later ones."""
        assert step >= self.served, f"generators serve {self.served} and went back to {step}"
        self.served = step

    def take(self, finished: Collection[int]) -> list[int] | None:
        """Return the groups of the next step in the order they were started, or None if it has to wait.

        The step waits for more groups to finish, or for an unfinished one that no later step could take in
        time.
        """
        step = self.num_taken + 1
        first = sorted(finished, key=lambda group: (self._last_steps[group], group))[: self.groups_per_batch]
        if len(first) < self.groups_per_batch:
            return None
        left = sorted(last for group, last in self._last_steps.items() if group not in first)
        # The groups left go to the steps that follow, P to each.
        if any(last <= step + place // self.groups_per_batch for place, last in enumerate(left)):
            return None
        for group in first:
            del self._last_steps[group]
        self.num_taken = step
        return sorted(first)


def off_policy_steps(
    groups: Sequence[Group], *, step: int, step_of_version: Mapping[int, int], max_off_policy_steps: int
) -> np.ndarray:
    """Return [tokens of all scored rollouts] int64: steps between the weights that drew a token and `step`'s.

    Args:
        step_of_version: the step after which each policy version was published.

    Raises:
        StalePolicyError: names the problem, the versions of its tokens and the allowed versions.
    """
    ages = {version: step - 1 - published for version, published in step_of_version.items()}
    allowed = {version: age for version, age in ages.items() if 0 <= age <= max_off_policy_steps}
    steps = []
    for group in groups:
        for rollout in (member.rollout for member in group.scored):
            versions = np.concatenate([turn.completion.policy_versions for turn in rollout.turns])
            if not set(versions.tolist()) <= allowed.keys():
                raise StalePolicyError(
                    f"a completion of problem {rollout.prompt.problem.id!r} was drawn by policy versions "
                    f"{np.unique(versions).tolist()}: with loop.max_off_policy_steps={max_off_policy_steps}, "
                    f"step {step} may train only on versions {sorted(allowed)}: the weight sync is broken"
                )
            steps += [allowed[version] for version in versions.tolist()]
    return np.array(steps, dtype=np.int64)
