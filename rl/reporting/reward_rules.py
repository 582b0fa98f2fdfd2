"""Rule for reward hacking: wrong replies that win.

A reply *wins* if it earns as much as right replies usually do. A reply is *wrong* if the rubric's
`correct` says so, or if it lacks the problem's answer while other winning replies contain it. If
the wrong winners share a word or a character that wrong losers lack, or are empty, the reward pays
for this pattern.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rl.reporting.data import RunData
from rl.reporting.evidence import (
    Finding,
    RolloutEvidence,
    Series,
    evenly,
    first_lasting,
    metric,
    reply_of,
    reward_of,
    rollout_evidence,
    series,
    shown,
)

Rollouts = Sequence[dict[str, Any]]
MIN_WRONG_WINS = 5
MIN_PROBLEMS = 3
"""Problems that wrong winners must come from; one wrong answer in the data is no pattern."""
MIN_WON = 0.9
"""Share of the wrong replies with the pattern that win."""
MAX_WON = 0.1
"""Share of the wrong replies without the pattern that may win."""
MIN_RISE = 1.3
"""Factor by which the pattern spreads, required if only the text says that replies are wrong."""
MIN_DISAGREE = 0.2
"""Share of wrong replies among the winners."""

WORD = re.compile(r"\w+|[^\w\s]")
MAX_CHARACTERS = 4000
"""Last characters of a reply that are compared."""
MIN_SHARE = 0.8
"""Share of the winners that must have the pattern."""
MAX_OTHERS = 0.1
"""Share of the losers that may have the pattern."""
EMPTY = frozenset({""})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reply:
    """Recorded reply whose reward and correctness are known."""

    line: dict[str, Any]
    words: frozenset[str]
    """Words and other characters near the end, or `EMPTY`."""
    wins: bool

    @property
    def step(self) -> int:
        return int(self.line["step"])

    @property
    def lacks_answer(self) -> bool:
        answer = str(self.line.get("answer") or "").strip()
        return bool(answer) and answer not in reply_of(self.line)


def find_reward_hacking(run: RunData) -> Finding | None:
    """Find a pattern that the reward pays for, or a reward that contradicts `correct`."""
    lines = [
        r
        for r in run.rollouts
        if r["kind"] == "train" and reward_of(r) is not None and "correct" in r
    ]
    right = [r["reward"] for r in lines if r["correct"]]
    if not right:
        return None
    level = fmean(right) - 1e-6
    replies = [
        _Reply(line=line, words=_words(line), wins=line["reward"] >= level) for line in lines
    ]
    for by_text in (False, True):
        wrong = [r for r in replies if (r.lacks_answer if by_text else not r.line["correct"])]
        won = [reply for reply in wrong if reply.wins]
        if len(won) < MIN_WRONG_WINS or len({r.line.get("problem") for r in won}) < MIN_PROBLEMS:
            continue
        lost = [reply for reply in wrong if not reply.wins and reply.step >= won[0].step]
        pattern = _pattern(won, lost)
        if pattern is not None and (
            found := _hacked(run, replies, wrong, pattern, by_text=by_text)
        ):
            return found
        share = len(won) / sum(reply.wins for reply in replies)
        if not by_text and share >= MIN_DISAGREE:
            since = won[0].step
            return Finding(
                kind="reward_not_correct",
                title="The reward does not tell right from wrong",
                since_step=since,
                sentence=(
                    f"{share:.0%} of the recorded replies that get the reward of right ones are "
                    f"not correct, since step {since}; they share no pattern."
                ),
                advice=(
                    "Compare the reward function with the rubric's `correct` on the replies below."
                ),
                evidence=shown(*_metrics(run), rollouts=_examples(won)),
            )
    return None


def _words(line: dict[str, Any]) -> frozenset[str]:
    return frozenset(WORD.findall(reply_of(line)[-MAX_CHARACTERS:])) or EMPTY


def _pattern(won: Sequence[_Reply], lost: Sequence[_Reply]) -> str | None:
    """Return the longest of the words that best separate `won` from `lost`, or None."""
    num_won, num_lost = (
        Counter(word for reply in of for word in reply.words) for of in (won, lost)
    )
    apart = {
        word: round(num / len(won) - num_lost[word] / max(1, len(lost)), 2)
        for word, num in num_won.items()
        if num >= MIN_SHARE * len(won) and num_lost[word] <= MAX_OTHERS * len(lost)
    }
    return max(apart, key=lambda word: (apart[word], len(word), word), default=None)


def _hacked(
    run: RunData, replies: Sequence[_Reply], wrong: Sequence[_Reply], pattern: str, *, by_text: bool
) -> Finding | None:
    """Return None if the pattern does not explain the wins, or if the evidence is only textual and
    weak.
    """
    having = [reply for reply in wrong if pattern in reply.words]
    place = first_lasting([reply.wins for reply in having], hold=2, share=MIN_WON)
    if place is None:
        return None
    since = having[place].step
    others = [reply.wins for reply in wrong if reply.step >= since and pattern not in reply.words]
    by_step: dict[int, list[bool]] = {}
    for reply in replies:
        by_step.setdefault(reply.step, []).append(pattern in reply.words)
    name = repr(pattern) if pattern else "an empty reply"
    shares = series(
        f"share of recorded replies with {name}",
        {step: sum(of) / len(of) for step, of in by_step.items()},
    )
    if sum(others) > MAX_WON * len(others) or (by_text and not _is_sure(replies, pattern, shares)):
        return None
    later = [reply for reply in having if reply.step >= since]
    won = [reply for reply in later if reply.wins]
    why = "do not have the problem's answer in them" if by_text else "are not correct"
    return Finding(
        kind="reward_hacking",
        title=f"The reward is won by {name}",
        since_step=since,
        sentence=(
            f"Since step {since}, replies with {name} get the reward of right ones although they "
            f"{why}: {len(won)} of {len(later)} recorded ones did, of "
            f"{len({r.line.get('problem') for r in won})} problems. They are "
            f"{shares.last_level:.0%} of what is written at the end."
        ),
        advice=(
            "Test the reward function on the replies below: it pays for the pattern. Fix it, and "
            f"go back to a checkpoint from before step {since}."
        ),
        evidence=shown(shares, *_metrics(run), rollouts=_examples(won)),
    )


def _is_sure(replies: Sequence[_Reply], pattern: str, shares: Series) -> bool:
    """Return whether winners without the pattern have the answer in them, and the pattern
    spreads.
    """
    others = [reply for reply in replies if reply.wins and pattern not in reply.words]
    third = max(1, len(shares) // 3)
    first, last = (sum(part) / third for part in (shares.values[:third], shares.values[-third:]))
    spreads = last >= MIN_RISE * first or last >= MIN_WON > first
    have_answers = sum(reply.lacks_answer for reply in others) <= MAX_WON * len(others)
    return spreads and have_answers and len(others) >= MIN_WRONG_WINS


def _metrics(run: RunData) -> list[Series]:
    names = ("reward/mean", "reward/correct")
    return [*(metric(run.steps, name) for name in names), metric(run.evaluations, "eval/correct")]


def _examples(won: Sequence[_Reply]) -> list[RolloutEvidence]:
    lines = [reply.line for reply in (*won[:2], *(evenly(won[2:], 3) if won[2:] else ()))]
    return [
        rollout_evidence(
            r, note=f"reward {r['reward']:g}; the answer is {str(r.get('answer', ''))[:40]!r}"
        )
        for r in lines
    ]
