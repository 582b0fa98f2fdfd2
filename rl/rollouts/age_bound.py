"""How far generation may run ahead of training: the bound on the age of what is trained on.

A step trains on P groups. Weights are counted in steps: those after step u are number u, step r trains
weights r - 1. The *age* of a token that weights u drew is r - 1 - u when step r trains on it.

A group that starts while every generator serves at least weights u may be taken by step u + max_age + 1
at the latest: that is its `last_step`. With t steps taken, what is outstanding (started, not taken and
not released) always satisfies

    (C)    for every e:  the number of groups with last_step <= e  is at most  (e - t) P

so that taking P groups a step, those with the earliest last_step first, none is ever too late. Proof in
docs/async.md. Nothing here waits or knows of processes.
"""

from __future__ import annotations

from collections.abc import Collection


class AgeBound:
    """Says which groups may start, and which of the finished ones the next step takes."""

    def __init__(self, *, max_age: int, num_prompts: int, num_steps: int, step: int = 0) -> None:
        """`num_prompts` groups a step, up to step `num_steps`; `step` steps are done already."""
        self.max_age = max_age
        self.num_prompts = num_prompts
        self.num_steps = num_steps
        self.num_taken = step
        self.served = step
        """Weights, counted in steps, that every generator has reached."""
        self._last_steps: dict[int, int] = {}
        """Of each outstanding group, by its number."""

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Groups that were started and neither taken nor released, in order."""
        return tuple(sorted(self._last_steps))

    def may_start(self) -> bool:
        """Whether one more group has a place: in a step that the bound allows, and before the last step."""
        last_step = min(self.served + self.max_age + 1, self.num_steps)
        return len(self._last_steps) < (last_step - self.num_taken) * self.num_prompts

    def start(self, group: int) -> None:
        assert self.may_start(), f"group {group} has no place"
        assert group not in self._last_steps, f"group {group} has started before"
        self._last_steps[group] = self.served + self.max_age + 1

    def last_step(self, group: int) -> int:
        """Of an outstanding group: the last that it may be trained on in."""
        return self._last_steps[group]

    def hold(self, group: int, *, last_step: int) -> None:
        """A group that an earlier bound had, which this one continues."""
        assert group not in self._last_steps, f"group {group} has started before"
        self._last_steps[group] = last_step

    def release(self, group: int) -> None:
        """The group is not trained on: its place is free for another one."""
        del self._last_steps[group]

    def serve(self, step: int) -> None:
        """From now on every generator draws from the weights after `step`, or later ones."""
        assert step >= self.served, f"generators serve {self.served} and went back to {step}"
        self.served = step

    def take(self, finished: Collection[int]) -> list[int] | None:
        """The groups of the next step, in the order they were started; None while it has to wait.

        It waits for more to finish, or for an unfinished one that no later step could take in time.
        """
        step = self.num_taken + 1
        first = sorted(finished, key=lambda group: (self._last_steps[group], group))[: self.num_prompts]
        if len(first) < self.num_prompts:
            return None
        left = sorted(last for group, last in self._last_steps.items() if group not in first)
        # Of those left, each P in turn go to one of the steps that follow.
        if any(last <= step + place // self.num_prompts for place, last in enumerate(left)):
            return None
        for group in first:
            del self._last_steps[group]
        self.num_taken = step
        return sorted(first)
