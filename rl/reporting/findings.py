"""What looks wrong in a run, since which step, and what shows it.

    for finding in find(read_run("outputs/try-1")):
        print(finding.since_step, finding.title, finding.sentence)

Each rule is a function from a run's data to findings; it says nothing rather than something doubtful, for a
healthy run has none. docs/troubleshooting.md tells what each looks for.
"""

from __future__ import annotations

from collections.abc import Callable

from rl.reporting.evidence import Evidence, Finding, MetricEvidence, RolloutEvidence
from rl.reporting.rules.exploration import find_collapsed_entropy, find_no_variance
from rl.reporting.rules.failures import find_failed_rewards, find_not_finite, find_went_back_often
from rl.reporting.rules.generalization import find_no_generalization
from rl.reporting.rules.generator import find_growing_difference, find_stale_generator
from rl.reporting.rules.idle import find_idle_actors
from rl.reporting.rules.length import find_length_drift
from rl.reporting.rules.reward_hacking import find_reward_hacking
from rl.reporting.run_data import RunData

__all__ = ["KINDS", "Evidence", "Finding", "MetricEvidence", "RolloutEvidence", "find"]

Rule = Callable[[RunData], list[Finding]]
RULES: tuple[Rule, ...] = (
    find_not_finite,
    find_stale_generator,
    find_growing_difference,
    find_reward_hacking,
    find_length_drift,
    find_collapsed_entropy,
    find_no_variance,
    find_no_generalization,
    find_failed_rewards,
    find_went_back_often,
    find_idle_actors,
)
KINDS = (
    "not_finite",
    "stale_generator",
    "logprob_difference",
    "growing_difference",
    "reward_hacking",
    "reward_not_correct",
    "length_drift",
    "collapsed_entropy",
    "no_reward_variance",
    "no_generalization",
    "failed_rewards",
    "went_back_often",
    "idle_actor",
)


def find(run: RunData) -> list[Finding]:
    """Of all rules, the earliest first."""
    found = [finding for rule in RULES for finding in rule(run)]
    return sorted(found, key=lambda finding: finding.since_step)
