"""What a step or an evaluation reports of its scores, function by function."""

from __future__ import annotations

from collections.abc import Sequence

from rl.observability.metrics import Mean, Metric, Sum
from rl.rollouts.rubric import ENVIRONMENT
from rl.types import Score

OF_STEP = frozenset({"mean", "std", "correct", "equal_groups", "kl", "num_failed", "num_unparsed"})
OF_EVALUATION = frozenset({"correct", "reward", "num_problems", "turns_mean", "num_failed", "num_unparsed"})
PASS_AT = "pass@"
"""Of an evaluation too, before the number of tries."""


def score_metrics(scores: Sequence[Score], *, prefix: str = "reward") -> dict[str, Metric]:
    """`<prefix>/<name>` of each reward function, unweighted, as a mean over what could be scored;
    `<prefix>/num_failed`, and `<prefix>/num_unparsed`: rollouts in which a function found no answer.

    Of all scores of a step at once: the environment's part is missing where it is 0, and it is reported where
    any of them has it, with 0 for the others.
    """
    good = [score for score in scores if score.failure is None]
    metrics: dict[str, Metric] = {
        f"{prefix}/num_failed": Sum(len(scores) - len(good)),
        f"{prefix}/num_unparsed": Sum(sum(bool(score.unparsed) for score in good)),
    }
    for name in dict.fromkeys(name for score in good for name in score.parts):
        values = [score.parts[name] for score in good if name in score.parts]
        count = len(good) if name == ENVIRONMENT else len(values)
        metrics[f"{prefix}/{_reported_name(name)}"] = Mean(sum(values), count)
    return metrics


def _reported_name(name: str) -> str:
    """`function_<name>` where the name is that of something that is reported beside the functions."""
    is_taken = name in OF_STEP | OF_EVALUATION or name.startswith(PASS_AT)
    return f"function_{name}" if is_taken else name
