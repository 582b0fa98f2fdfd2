"""What replies share that win a reward they did not earn: words in a row, or how the reply ended."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rl.reporting.evidence import evenly, reply_of

WORD = re.compile(r"\w+|[^\w\s]")
MAX_WORDS = 8
"""In a row, of one pattern."""
MAX_REPLIES = 200
"""Looked at on each side; more are taken evenly."""
MAX_CHARACTERS = 4000
"""Of a reply, from its end: where answers stand."""
MIN_SHARE = 0.8
"""Of the replies that won, those with the pattern."""
MAX_OTHERS = 0.1
"""Of the replies that did not, those with it."""
EMPTY, CUT_OFF = ("", "an empty reply"), ("", "a reply that was cut off")
"""Patterns that are no words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """Replies of a kind."""

    words: tuple[str, ...]
    """In a row; or one of those that are no words."""
    name: str
    """For people."""

    def is_in(self, rollout: dict[str, Any]) -> bool:
        return self.words in _features(rollout)


def find_pattern(won: Sequence[dict[str, Any]], lost: Sequence[dict[str, Any]]) -> Pattern | None:
    """What most of `won` have and hardly any of `lost`; the longest of those that tell them apart best."""
    won, lost = evenly(won, MAX_REPLIES), evenly(lost, MAX_REPLIES)
    counts = Counter(feature for rollout in won for feature in _features(rollout))
    likely = {feature: n / len(won) for feature, n in counts.items() if n >= MIN_SHARE * len(won)}
    others = Counter(f for rollout in lost for f in _features(rollout) if f in likely)
    apart = {
        feature: share - others[feature] / max(1, len(lost))
        for feature, share in likely.items()
        if others[feature] <= MAX_OTHERS * len(lost)
    }
    if not apart:
        return None
    best = max(apart, key=lambda feature: (round(apart[feature], 2), len(feature), feature))
    return Pattern(words=best, name=_name(best, won))


def _features(rollout: dict[str, Any]) -> set[tuple[str, ...]]:
    """All words in a row, and how it ended."""
    text = reply_of(rollout)[-MAX_CHARACTERS:]
    words = WORD.findall(text)
    found = {
        tuple(words[i : i + n]) for n in range(1, MAX_WORDS + 1) for i in range(max(0, len(words) - n + 1))
    }
    if not text.strip():
        found.add(EMPTY)
    if any(turn.get("finish_reason") == "length" for turn in rollout["turns"]):
        found.add(CUT_OFF)
    return found


def _name(words: tuple[str, ...], rollouts: Iterable[dict[str, Any]]) -> str:
    """As it stands in a reply, spaces and all."""
    if words in (EMPTY, CUT_OFF):
        return words[1]
    as_written = re.compile(r"\s*".join(map(re.escape, words)))
    for rollout in rollouts:
        if match := as_written.search(reply_of(rollout)):
            return repr(match.group())
    return repr(" ".join(words))
