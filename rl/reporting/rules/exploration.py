"""Rewards that teach nothing: an entropy that has collapsed, and groups whose rewards are all equal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from statistics import median
from typing import Any

from rl.reporting.evidence import Evidence, Finding, metric_evidence, rollout_evidence
from rl.reporting.run_data import RunData
from rl.reporting.series import Series, edge, first_lasting, last_level, metric

ENTROPY, EQUAL, CORRECT = "loss/entropy_mean", "reward/equal_groups", "reward/correct"
COLLAPSED = 0.1
"""Of what the entropy was at the start."""
SOLVED = 0.9
"""Share of right replies from which there is little left to learn."""
NO_VARIANCE = 0.9
"""Share of groups with equal rewards."""
MIN_STEPS = 5


def find_collapsed_entropy(run: RunData) -> list[Finding]:
    """The policy says the same all the time before it has learnt the task."""
    entropy = metric(run.steps, ENTROPY)
    if len(entropy) < 2 * MIN_STEPS or _is_solved(run, since=entropy.steps[-edge(len(entropy))]):
        return []
    start = median(entropy.values[:3])
    place = first_lasting([value <= COLLAPSED * start for value in entropy.values], hold=MIN_STEPS)
    if place is None or start <= 0:
        return []
    since = entropy.steps[place]
    correct = metric(run.steps, CORRECT)
    right = f", with {last_level(correct.values):.0%} of the replies right" if len(correct) else ""
    return [
        Finding(
            kind="collapsed_entropy",
            title="The entropy has collapsed",
            since_step=since,
            sentence=(
                f"Since step {since} the entropy is below {COLLAPSED:.0%} of its start: from {start:.3g} to "
                f"{last_level(entropy.values):.3g} nats a token{right}. Replies of a group hardly differ any "
                "more, so that there is little left to learn from."
            ),
            advice=(
                "A lower learning rate, a higher upper clip (losses.dapo), a bonus for entropy (its sign "
                "is plus), more samples of a prompt, or harder problems; go on from a checkpoint before it."
            ),
            evidence=(*_metrics(run, (ENTROPY, EQUAL, CORRECT)), *_same_group(run.rollouts, since)),
        )
    ]


def find_no_variance(run: RunData) -> list[Finding]:
    """Nearly all groups have equal rewards, and the task is not solved."""
    equal = metric(run.steps, EQUAL)
    place = first_lasting([value >= NO_VARIANCE for value in equal.values], hold=MIN_STEPS)
    if place is None or len(equal) - place < MIN_STEPS or _is_solved(run, since=equal.steps[place]):
        return []
    since = equal.steps[place]
    rewards = metric(run.steps, "reward/mean").since(since)
    level = f" (reward {last_level(rewards.values):.3g})" if len(rewards) else ""
    return [
        Finding(
            kind="no_reward_variance",
            title="Groups have equal rewards",
            since_step=since,
            sentence=(
                f"Since step {since} in {last_level(equal.since(since).values):.0%} of the groups all "
                f"replies earn the same{level}: their advantage is 0, and they teach nothing."
            ),
            advice=(
                "Problems of another difficulty (docs/data.md, by pass rate), loop.equal_groups drop, "
                "more samples of a prompt, or a reward with more steps between wrong and right."
            ),
            evidence=(*_metrics(run, (EQUAL, "reward/mean", CORRECT)), *_same_group(run.rollouts, since)),
        )
    ]


def _is_solved(run: RunData, *, since: int) -> bool:
    """Right replies are most of them."""
    correct = metric(run.steps, CORRECT).since(since)
    return len(correct) > 0 and last_level(correct.values) >= SOLVED


def _metrics(run: RunData, names: Sequence[str]) -> list[Evidence]:
    series: list[Series] = [metric(run.steps, name) for name in names]
    return [metric_evidence(one) for one in series if len(one)]


def _same_group(rollouts: Sequence[dict[str, Any]], since: int) -> list[Evidence]:
    """Up to three replies to the last problem that was recorded."""
    groups: dict[tuple[int, object], list[dict[str, Any]]] = {}
    for rollout in rollouts:
        if rollout["kind"] in ("train", "dropped") and rollout["step"] >= since:
            groups.setdefault((rollout["step"], rollout.get("problem")), []).append(rollout)
    last = list(chain.from_iterable(list(groups.values())[-1:]))
    return [rollout_evidence(r, note=f"reward {r.get('reward')}") for r in last[:3]]
