"""Replies that grow or shrink without getting better, and rewards that pay for length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median
from typing import Any

from rl.reporting.evidence import Evidence, Finding, evenly, metric_evidence, reward_of, rollout_evidence
from rl.reporting.run_data import RunData
from rl.reporting.series import Series, edge, first_lasting, first_level, knee, last_level, metric

LENGTH, CUT_OFF = "completion/tokens_mean", "completion/cut_off"
TIMES = 1.5
"""By which the length changes."""
CUT_OFF_SHARE = 0.3
"""Of replies that end at the limit, where there were hardly any."""
SUCCESS = 0.03
"""By which the share of right replies rises where longer, or shorter, is better."""
MIN_STEPS = 10
PAYS = 0.8
"""Of pairs of replies to one problem, both right or both wrong: how much surer the longer one earns more."""
MIN_DIFFERENT = 0.1
"""Of the pairs of a step, those with different rewards, for these to tell anything."""
PAID = "reward for length, -1 to 1"
MAX_PAIRS = 2000
"""Of a step."""


def find_length_drift(run: RunData) -> list[Finding]:
    """At most one."""
    lengths = metric(run.steps, LENGTH)
    if len(lengths) < MIN_STEPS:
        return []
    success = metric(run.steps, "reward/correct")
    cut_off = metric(run.steps, CUT_OFF)
    drift = _drift_without_success(lengths, success)
    paid = _paid(run.rollouts, correct_only=True)
    if drift is None:
        runs_into_limit = (
            len(cut_off) > 0
            and last_level(cut_off.values) >= CUT_OFF_SHARE + first_level(cut_off.values)
            and last_level(lengths.values) >= 1.2 * first_level(lengths.values)
        )
        if runs_into_limit or _grows_while_paid(lengths, paid):
            drift = 1
    if drift is None:
        return []
    since, is_paid = _since(run, lengths, paid, drift)
    return [_finding(run, lengths, paid, drift=drift, since=since, is_paid=is_paid)]


def _drift_without_success(lengths: Series, success: Series) -> int | None:
    """1 where replies get longer, -1 where shorter, from some point on without being right more often."""
    if len(success) != len(lengths):
        return None
    num = len(lengths)
    end, right = last_level(lengths.values), last_level(success.values)
    width = edge(num)
    for start in sorted({round(num * tenth / 10) for tenth in range(8)}):
        if num - start < MIN_STEPS:
            break
        begin = median(lengths.values[start : start + width])
        gain = right - median(success.values[start : start + width])
        if begin > 0 and end > 0 and abs(math.log(end / begin)) >= math.log(TIMES) and gain < SUCCESS:
            return 1 if end > begin else -1
    return None


def _grows_while_paid(lengths: Series, paid: Series) -> bool:
    """Of equally right replies the longer earns more, and replies have become longer since that began."""
    place = first_lasting([value >= PAYS for value in paid.values])
    if place is None:
        return False
    before = lengths.before(paid.steps[place] + 1)
    level = last_level(before.values[-5:]) if len(before) else first_level(lengths.values)
    return last_level(lengths.values) >= 1.3 * level


def _since(run: RunData, lengths: Series, paid: Series, drift: int) -> tuple[int, bool]:
    """Where the reward begins to pay for it; else where the length leaves its line. And which it is."""
    for series in (paid, _paid(run.rollouts, correct_only=False)):
        place = first_lasting([value * drift >= PAYS for value in series.values], share=0.6)
        if place is not None:
            return series.steps[place], True
    return lengths.steps[knee([math.log(max(value, 1e-3)) for value in lengths.values])], False


def _paid(rollouts: Iterable[dict[str, Any]], *, correct_only: bool) -> Series:
    """By step, of pairs of recorded replies to one problem that are both right, or both wrong: 1 where the
    longer one earns more, -1 where less, whenever their rewards differ; 0 where hardly any do. Steps without
    such pairs are left out."""
    groups: dict[tuple[int, object, object], list[tuple[int, float]]] = {}
    for rollout in rollouts:
        if rollout["kind"] != "train" or reward_of(rollout) is None:
            continue
        correct = rollout.get("correct")
        if correct or not correct_only:
            key = (rollout["step"], rollout.get("problem"), correct)
            groups.setdefault(key, []).append((_length(rollout), _earned(rollout)))
    signs: dict[int, list[int]] = {}
    for (step, _, _), members in groups.items():
        of_step = signs.setdefault(step, [])
        for (length, reward), (other_length, other) in combinations(members, 2):
            if length != other_length and len(of_step) < MAX_PAIRS:
                of_step.append(_sign(length - other_length) * _sign(reward - other))
    steps = sorted(step for step, of_step in signs.items() if of_step)
    return Series(name=PAID, steps=steps, values=[_agreement(signs[step]) for step in steps])


def _agreement(signs: Sequence[int]) -> float:
    """Mean of those that are not 0, if they are enough."""
    num = sum(map(abs, signs))
    return sum(signs) / num if num >= max(2, MIN_DIFFERENT * len(signs)) else 0.0


def _length(rollout: dict[str, Any]) -> int:
    """Tokens; characters where tokens were not recorded."""
    return sum(len(turn.get("token_ids") or str(turn.get("reply", ""))) for turn in rollout["turns"])


def _earned(rollout: dict[str, Any]) -> float:
    """With what the length took off (`loop.overlong`)."""
    return float(rollout["reward"]) + float(rollout.get("parts", {}).get("overlong", 0.0))


def _sign(difference: float) -> int:
    return 0 if abs(difference) < 1e-9 else 1 if difference > 0 else -1


def _finding(
    run: RunData, lengths: Series, paid: Series, *, drift: int, since: int, is_paid: bool
) -> Finding:
    before, after = lengths.before(since), lengths.since(since)
    was = last_level(before.values) if len(before) else first_level(lengths.values)
    now = last_level(after.values)
    how = "longer" if drift > 0 else "shorter"
    success = metric(run.steps, "reward/correct")
    part = success.since(since)
    right = f", and right replies go from {first_level(part.values):.0%} to {last_level(part.values):.0%}"
    paid_for = f"; of equally right replies the {how} one earns more" if is_paid else ""
    cut_off = metric(run.steps, CUT_OFF)
    at_limit = last_level(cut_off.values) if len(cut_off) else 0.0
    limit = f"; {at_limit:.0%} are cut off" if at_limit >= 0.05 else ""
    return Finding(
        kind="length_drift",
        title=f"Replies get {how}"
        + (" because they are paid for it" if is_paid else " without getting better"),
        since_step=since,
        sentence=(
            f"Since step {since} replies go from {was:.4g} to {now:.4g} tokens"
            f"{right if len(part) else ''}{paid_for}{limit}."
        ),
        advice=(
            "Look at the sign and the size of whatever in the reward depends on length (loop.overlong, a "
            "part of the rubric), and at loop.sampling.max_tokens; a loss that divides by the length of "
            "each reply (docs/losses.md) also favours long wrong ones."
        ),
        evidence=tuple(_evidence(run, (lengths, success, cut_off, paid), since)),
    )


def _evidence(run: RunData, series: Sequence[Series], since: int) -> list[Evidence]:
    found: list[Evidence] = [metric_evidence(one) for one in series if len(one)]
    trained = [r for r in run.rollouts if r["kind"] == "train" and reward_of(r) is not None]
    for part in ([r for r in trained if r["step"] < since], [r for r in trained if r["step"] >= since]):
        for rollout in evenly(part[-16:], 2):
            note = f"{_length(rollout)} tokens, reward {_earned(rollout):.4g}"
            found.append(rollout_evidence(rollout, note=note))
    return found
