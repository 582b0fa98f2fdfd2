"""A reward that rises in training and not on held-out problems."""

from __future__ import annotations

from statistics import median

from rl.reporting.evidence import Finding, metric_evidence, reward_of
from rl.reporting.run_data import RunData
from rl.reporting.series import Series, first_level, knee, last_level, metric

RISE = 0.2
"""Of the range of rewards in training."""
MIN_EVALUATIONS = 4


def find_no_generalization(run: RunData) -> list[Finding]:
    """Rewards are better and better on what is trained on, greedy replies to other problems are not."""
    rewards, held_out = metric(run.steps, "reward/mean"), metric(run.evaluations, "eval/reward")
    trained = [reward_of(r) for r in run.rollouts if r["kind"] == "train"]
    values = [reward for reward in trained if reward is not None]
    if len(held_out) < MIN_EVALUATIONS or len(rewards) < 2 * MIN_EVALUATIONS or not values:
        return []
    scale = max(values) - min(values)
    rise = last_level(rewards.values) - first_level(rewards.values)
    early, late = _levels(held_out)
    # Greedy replies are often better than sampled ones to begin with, and then have little to gain.
    if scale <= 0 or rise < RISE * scale or late - early > 0.1 * rise:
        return []
    if late >= last_level(rewards.values) - 0.1 * scale:
        return []
    since = rewards.steps[knee(rewards.values)]
    return [
        Finding(
            kind="no_generalization",
            title="The reward rises in training alone",
            since_step=since,
            sentence=(
                f"Since about step {since} the reward of training rises by {rise:.3g}, to "
                f"{last_level(rewards.values):.3g}; on held-out problems it goes from {early:.3g} to "
                f"{late:.3g}."
            ),
            advice=(
                "Few training problems that are learnt by heart, held-out ones of another kind, or a "
                "reward that depends on what only training has: compare the recorded replies of both."
            ),
            evidence=(
                metric_evidence(rewards),
                metric_evidence(held_out),
                *(metric_evidence(s) for s in [metric(run.evaluations, "eval/correct")] if len(s)),
            ),
        )
    ]


def _levels(series: Series) -> tuple[float, float]:
    half = max(1, min(3, len(series) // 2))
    return median(series.values[:half]), median(series.values[-half:])
