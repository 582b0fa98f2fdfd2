"""How old the tokens of a batch are, held against the bound when they are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rl.errors import RunError
from rl.rollouts.group import Group


class StalePolicyError(RunError):
    """A token is older than the bound allows, or of weights that no generator should have."""


def token_ages(
    groups: Sequence[Group], *, step: int, step_of_version: Mapping[int, int], max_age: int
) -> np.ndarray:
    """[tokens of all scored rollouts] int64: steps between the weights that drew each and those that
    `step` trains.

    Args:
        step_of_version: the step after which each policy version was published.

    Raises:
        StalePolicyError: names the problem, the versions of its tokens and those that are allowed.
    """
    allowed = {v: step - 1 - s for v, s in step_of_version.items() if 0 <= step - 1 - s <= max_age}
    ages = []
    for group in groups:
        for rollout in (member.rollout for member in group.scored):
            versions = np.concatenate([turn.completion.policy_versions for turn in rollout.turns])
            if not set(versions.tolist()) <= allowed.keys():
                raise StalePolicyError(
                    f"a completion of problem {rollout.prompt.problem.id!r} was drawn by policy versions "
                    f"{np.unique(versions).tolist()}: with loop.max_policy_age={max_age}, step {step} may "
                    f"train on those of {sorted(allowed)} alone: the weights' sync is broken"
                )
            ages += [allowed[version] for version in versions.tolist()]
    return np.array(ages, dtype=np.int64)
