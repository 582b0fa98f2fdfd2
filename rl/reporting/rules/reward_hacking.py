"""Rewards that are won without being earned.

A reply *wins* whose reward is as high as that of right ones usually is. It is *wrong* by what else is
known of it: the rubric's `correct`, or that it does not have the problem's answer in it, where other winning
replies do. Replies that win and are wrong contradict the reward; where they share a pattern that wrong
replies which lose do not have, the pattern is what is paid for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from rl.reporting.evidence import (
    Evidence,
    Finding,
    evenly,
    metric_evidence,
    reply_of,
    reward_of,
    rollout_evidence,
)
from rl.reporting.rules.reward_patterns import Pattern, find_pattern
from rl.reporting.run_data import RunData
from rl.reporting.series import Series, first_lasting, last_level, metric

Rollouts = Sequence[dict[str, Any]]
MIN_WRONG_WINS = 5
MIN_RIGHT = 5
"""Right replies by which is told what such replies earn."""
MIN_PROBLEMS = 3
"""That they are of: one problem whose answer is wrong in the data is no pattern."""
MIN_WON = 0.9
"""Of the wrong replies with the pattern, those that win."""
MAX_WON = 0.1
"""Of the wrong replies without it."""
MIN_RISE = 1.3
"""By which the pattern gets more frequent, where its replies are wrong by their text alone."""
MIN_DISAGREE = 0.2
"""Of the replies that win, those that are wrong."""


def find_reward_hacking(run: RunData) -> list[Finding]:
    """At most one: a pattern that is paid for, or a reward that does not agree with what is right."""
    trained = [r for r in run.rollouts if r["kind"] == "train" and _is_scored(r)]
    if not any(r["correct"] for r in trained):
        return []
    levels = _winning_levels(trained)
    wins = [r["reward"] >= levels[r["step"]] for r in trained]
    for is_wrong, by_text in ((_is_marked_wrong, False), (_lacks_answer, True)):
        wrong = [(r, won) for r, won in zip(trained, wins, strict=True) if is_wrong(r)]
        won = [r for r, has_won in wrong if has_won]
        if len(won) < MIN_WRONG_WINS or len({r.get("problem") for r in won}) < MIN_PROBLEMS:
            continue
        lost = [r for r, has_won in wrong if not has_won]
        pattern = find_pattern(won, [r for r in lost if r["step"] >= won[0]["step"]])
        if pattern is not None:
            found = _of_pattern(run, trained, levels, wrong, pattern, by_text=by_text)
            if found is not None:
                return [found]
        if not by_text and len(won) >= MIN_DISAGREE * sum(wins):
            return [_disagreement(run, won, share=len(won) / sum(wins))]
    return []


def _is_scored(rollout: dict[str, Any]) -> bool:
    return reward_of(rollout) is not None and "correct" in rollout


def _winning_levels(trained: Rollouts) -> dict[int, float]:
    """By step, what right replies usually earn: those of the steps around it, or where there are few of them,
    the nearest. A reward's scale may change on the way."""
    right: dict[int, list[float]] = {}
    for rollout in trained:
        if rollout["correct"]:
            right.setdefault(rollout["step"], []).append(rollout["reward"])
    steps = sorted(right)
    levels = {}
    for step in {r["step"] for r in trained}:
        first = last = bisect_left(steps, step)
        some: list[float] = []
        while len(some) < MIN_RIGHT and (first > 0 or last < len(steps)):
            if last == len(steps) or (first > 0 and step - steps[first - 1] < steps[last] - step):
                first -= 1
                some += right[steps[first]]
            else:
                some += right[steps[last]]
                last += 1
        levels[step] = median(some) - 1e-6
    return levels


def _is_marked_wrong(rollout: dict[str, Any]) -> bool:
    return not rollout["correct"]


def _lacks_answer(rollout: dict[str, Any]) -> bool:
    answer = str(rollout.get("answer") or "").strip()
    return bool(answer) and answer not in reply_of(rollout)


def _of_pattern(
    run: RunData,
    trained: Rollouts,
    levels: dict[int, float],
    wrong: Sequence[tuple[dict[str, Any], bool]],
    pattern: Pattern,
    *,
    by_text: bool,
) -> Finding | None:
    """None where the pattern is not what wins, or nothing but the text says that its replies are wrong and it
    does not spread."""
    having = [(r, won) for r, won in wrong if pattern.is_in(r)]
    place = first_lasting([won for _, won in having], hold=2, share=MIN_WON)
    if place is None:
        return None
    since = having[place][0]["step"]
    others = [won for r, won in wrong if r["step"] >= since and not pattern.is_in(r)]
    if sum(others) > MAX_WON * len(others):
        return None
    if by_text and not (_others_have_answers(trained, levels, pattern) and _spreads(trained, pattern)):
        return None
    since = min([since, *_first_excess(run, trained, levels, pattern, since)])
    won = [r for r, has_won in having if has_won and r["step"] >= since]
    seen = f"{len(won)} of {len(won) + sum(not w for r, w in having if r['step'] >= since)}"
    why = "do not have the problem's answer in them" if by_text else "are not correct"
    shares = _shares(trained, pattern.is_in, name=f"share of recorded replies with {pattern.name}")
    return Finding(
        kind="reward_hacking",
        title=f"The reward is won by {pattern.name}",
        since_step=since,
        sentence=(
            f"Since step {since}, replies with {pattern.name} get the reward of right ones although they "
            f"{why}: {seen} recorded ones did, of {len({r.get('problem') for r in won})} problems. They are "
            f"{last_level(shares.values):.0%} of what is written at the end."
        ),
        advice=(
            "Read the reward function on the replies below: it pays for the pattern. Mend it, and go "
            f"back to a checkpoint from before step {since}."
        ),
        evidence=(metric_evidence(shares), *_metrics(run), *_replies(won)),
    )


def _others_have_answers(trained: Rollouts, levels: dict[int, float], pattern: Pattern) -> bool:
    """Whether winning replies without the pattern hold the answer as it is written in the data."""
    others = [r for r in trained if r["reward"] >= levels[r["step"]] and not pattern.is_in(r)]
    return len(others) >= MIN_WRONG_WINS and sum(map(_lacks_answer, others)) <= MAX_WON * len(others)


def _spreads(trained: Rollouts, pattern: Pattern) -> bool:
    shares = _shares(trained, pattern.is_in, name="").values
    third = max(1, len(shares) // 3)
    first, last = (sum(part) / third for part in (shares[:third], shares[-third:]))
    return last >= MIN_RISE * first or last >= MIN_WON > first


def _first_excess(
    run: RunData, trained: Rollouts, levels: dict[int, float], pattern: Pattern, since: int
) -> list[int]:
    """The step from which, of all rollouts and not of recorded ones alone, more get a part of the reward than
    are right; empty where no part goes with being right."""
    wrong = [r for r in trained if not r["correct"]]
    paid = [r for r in wrong if pattern.is_in(r) and r["reward"] >= levels[r["step"]]]
    found = []
    for name in sorted({name for r in paid for name in r.get("parts", {})}):
        values = {r["parts"][name] for r in trained if name in r.get("parts", {})}
        fair = [r for r in wrong if not pattern.is_in(r)]
        if not values <= {0, 1} or not fair or any(r.get("parts", {}).get(name) for r in fair):
            continue
        excess = {
            int(r["step"]): r[f"reward/{name}"] - r["reward/correct"]
            for r in run.steps
            if f"reward/{name}" in r and "reward/correct" in r
        }
        earlier = [step for step in sorted(excess) if step <= since]
        while earlier and excess[earlier[-1]] > 1e-9:
            found.append(earlier.pop())
    return found


def _disagreement(run: RunData, won: Rollouts, *, share: float) -> Finding:
    since = won[0]["step"]
    return Finding(
        kind="reward_not_correct",
        title="The reward does not tell right from wrong",
        since_step=since,
        sentence=(
            f"{share:.0%} of the recorded replies that get the reward of right ones are not correct, "
            f"since step {since}; they share no pattern."
        ),
        advice="Compare the reward function with the rubric's `correct` on the replies below.",
        evidence=(*_metrics(run), *_replies(won)),
    )


def _metrics(run: RunData) -> list[Evidence]:
    series = (
        metric(run.steps, "reward/mean"),
        metric(run.steps, "reward/correct"),
        metric(run.evaluations, "eval/correct"),
    )
    return [metric_evidence(one) for one in series if len(one)]


def _replies(won: Rollouts) -> list[Evidence]:
    first, rest = list(won[:2]), list(won[2:])
    return [
        rollout_evidence(r, note=f"reward {r['reward']:g}; the answer is {str(r.get('answer', ''))[:40]!r}")
        for r in (*first, *(evenly(rest, 3) if rest else ()))
    ]


def _shares(trained: Rollouts, has: Callable[[dict[str, Any]], bool], *, name: str) -> Series:
    """Of each step's recorded replies."""
    by_step: dict[int, list[bool]] = {}
    for rollout in trained:
        by_step.setdefault(rollout["step"], []).append(has(rollout))
    steps = sorted(by_step)
    return Series(name=name, steps=steps, values=[sum(by_step[s]) / len(by_step[s]) for s in steps])
