"""Rule for replies whose length drifts without getting better, or because the reward pays for length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from rl.reporting.data import RunData
from rl.reporting.evidence import Finding, Series, evenly, metric, reward_of, rollout_evidence, series, shown

TIMES = 1.5
"""Factor by which the length changes."""
CUT_OFF_SHARE = 0.3
"""Rise of the share of replies that are cut off at the limit."""
SUCCESS = 0.03
"""Rise of the share of right replies that justifies a change of length."""
MIN_STEPS = 10
PAYS = 0.8
"""Agreement of length and reward, -1 to 1, from which on length is paid for."""
MIN_DIFFERENT = 0.1
"""Share of a step's pairs that must have different rewards."""
MAX_PAIRS = 2000
"""Pairs of a step that are compared."""


def find_length_drift(run: RunData) -> Finding | None:
    """Find replies that get longer or shorter for no good reason."""
    lengths, success = metric(run.steps, "completion/tokens_mean"), metric(run.steps, "reward/correct")
    if len(lengths) < MIN_STEPS:
        return None
    cut_off, paid = metric(run.steps, "completion/cut_off"), _paid(run.rollouts)
    drift = _drift_without_success(lengths, success)
    paid_since = paid.lasting(lambda value: value >= PAYS, hold=3, share=0.6)
    if drift is None:
        runs_into_limit = len(cut_off) > 0 and cut_off.last_level >= CUT_OFF_SHARE + cut_off.first_level
        grows_while_paid = paid_since is not None and _grows(lengths, since=paid_since)
        if not (runs_into_limit and lengths.last_level >= 1.2 * lengths.first_level) and not grows_while_paid:
            return None
        drift = 1
    elif drift < 0:
        paid_since = paid.lasting(lambda value: value <= -PAYS, hold=3, share=0.6)
    since = paid_since or _since(lengths, drift)
    before, right, how = lengths.before(since), success.since(since), "longer" if drift > 0 else "shorter"
    was, now = (before if len(before) else lengths).last_level, lengths.since(since).last_level
    sentence = f"Since step {since} replies go from {was:.4g} to {now:.4g} tokens"
    if len(right):
        sentence += f", and right replies go from {right.first_level:.0%} to {right.last_level:.0%}"
    if paid_since:
        sentence += f"; of equally right replies the {how} one earns more"
    if len(cut_off) and cut_off.last_level >= 0.05:
        sentence += f"; {cut_off.last_level:.0%} are cut off"
    why = "because they are paid for it" if paid_since else "without getting better"
    return Finding(
        kind="length_drift",
        title=f"Replies get {how} {why}",
        since_step=since,
        sentence=f"{sentence}.",
        advice=(
            "Look at the sign and the size of whatever in the reward depends on length (loop.overlong, a "
            "part of the rubric), and at loop.sampling.max_tokens; a loss that divides by the length of "
            "each reply (docs/losses.md) also favours long wrong ones."
        ),
        evidence=shown(lengths, success, cut_off, paid, rollouts=_replies(run, since)),
    )


def _drift_without_success(lengths: Series, success: Series) -> int | None:
    """Return 1 if replies get longer without being right more often, -1 if shorter, else None."""
    if len(success) != len(lengths):
        return None
    for start in range(0, len(lengths) - MIN_STEPS + 1, max(1, len(lengths) // 10)):
        part, right = lengths.since(lengths.steps[start]), success.since(success.steps[start])
        change = math.log(max(part.last_level, 1e-3) / max(part.first_level, 1e-3))
        if abs(change) >= math.log(TIMES) and right.last_level - right.first_level < SUCCESS:
            return 1 if change > 0 else -1
    return None


def _grows(lengths: Series, *, since: int) -> bool:
    before = lengths.before(since + 1).values[-5:] or lengths.values[:1]
    return lengths.last_level >= 1.3 * sum(before) / len(before)


def _since(lengths: Series, drift: int) -> int:
    """Return the step from which the length has left its first level for good."""
    level = math.log(max(lengths.first_level, 1e-3))
    since = lengths.lasting(
        lambda value: drift * (math.log(max(value, 1e-3)) - level) >= math.log(1.2), hold=3
    )
    return since or lengths.steps[0]


def _paid(rollouts: Iterable[dict[str, Any]]) -> Series:
    """Return by step how far longer replies earn more (1) or less (-1) than equally right ones.

    Pairs of recorded replies to one problem are compared that are both right or both wrong and earn
    different rewards. The value is 0 if hardly any rewards differ; steps without pairs are left out.
    """
    groups: dict[tuple[int, object, object], list[tuple[int, float]]] = {}
    for rollout in rollouts:
        if rollout["kind"] == "train" and reward_of(rollout) is not None and rollout.get("correct"):
            key = (rollout["step"], rollout.get("problem"), rollout.get("correct"))
            groups.setdefault(key, []).append((_length(rollout), _earned(rollout)))
    signs: dict[int, list[int]] = {}
    for (step, _, _), members in groups.items():
        of_step = signs.setdefault(step, [])
        for (length, reward), (other_length, other) in combinations(members, 2):
            if length != other_length and len(of_step) < MAX_PAIRS:
                of_step.append(_sign(length - other_length) * _sign(reward - other))
    agreements = {step: _agreement(of_step) for step, of_step in signs.items() if of_step}
    return series("reward for length, -1 to 1", agreements)


def _agreement(signs: Sequence[int]) -> float:
    """Return the mean of the nonzero signs, or 0 if they are few."""
    num = sum(map(abs, signs))
    return sum(signs) / num if num >= max(2, MIN_DIFFERENT * len(signs)) else 0.0


def _length(rollout: dict[str, Any]) -> int:
    """Return the number of tokens, or of characters if tokens were not recorded."""
    return sum(len(turn.get("token_ids") or str(turn.get("reply", ""))) for turn in rollout["turns"])


def _earned(rollout: dict[str, Any]) -> float:
    """Return the reward including the penalty for length (`loop.overlong`)."""
    return float(rollout["reward"]) + float(rollout.get("parts", {}).get("overlong", 0.0))


def _sign(difference: float) -> int:
    return 0 if abs(difference) < 1e-9 else 1 if difference > 0 else -1


def _replies(run: RunData, since: int) -> Iterable[Any]:
    trained = [r for r in run.rollouts if r["kind"] == "train" and reward_of(r) is not None]
    for part in ([r for r in trained if r["step"] < since], [r for r in trained if r["step"] >= since]):
        for rollout in evenly(part[-16:], 2):
            note = f"{_length(rollout)} tokens, reward {_earned(rollout):.4g}"
            yield rollout_evidence(rollout, note=note)
