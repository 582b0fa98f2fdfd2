"""What a loop looks at in its own numbers before it goes on."""

from __future__ import annotations

from rl.errors import RunError
from rl.rollouts.producer import Batch, NothingToLearnError
from rl.types import ForwardBackwardResult


class LogprobMismatchError(RunError):
    """Trainer and generator disagree about tokens that equal weights should have drawn."""


def check_logprobs(result: ForwardBackwardResult, *, max_diff: float) -> None:
    """Of tokens that were drawn by the weights that are trained; `max_diff` in nats a token.

    Raises:
        LogprobMismatchError: the mean difference is larger.
    """
    if result.logprob_diff_mean > max_diff:
        raise LogprobMismatchError(
            f"the logprobs of trainer and generator differ by {result.logprob_diff_mean:.3g} nats a "
            f"token (at most {result.logprob_diff_max:.3g}), more than loop.max_logprob_diff="
            f"{max_diff:g}: they do not hold the same weights, or compute them in other precisions"
        )


def check_empty_steps(num_in_row: int, batch: Batch, *, most: int) -> None:
    """`num_in_row` steps, the last with this batch, had no policy gradient.

    Raises:
        NothingToLearnError: they are more than `most`.
    """
    if num_in_row > most:
        rewards = {member.score.reward for group in batch.groups for member in group.scored}
        raise NothingToLearnError(
            f"{num_in_row} steps in a row had equal rewards in every group (the last: "
            f"{sorted(rewards)[:3]}), more than loop.max_empty_steps={most}: the "
            "task is solved or out of reach, so there is no policy gradient"
        )
