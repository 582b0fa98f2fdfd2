"""What replies share that win a reward they did not earn: words in a row, characters near the end, or how the
reply ended."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl.reporting.evidence import evenly, reply_of

WORD = re.compile(r"\w+|[^\w\s]")
MAX_WORDS = 8
"""In a row, of one pattern."""
MAX_REPLIES = 200
"""Looked at on each side; more are taken evenly."""
MAX_CHARACTERS = 4000
"""Of a reply, from its end: where answers stand."""
LAST_CHARACTERS, MOST_IN_ROW = 40, 6
"""In which, and of which, a pattern of characters is: part of a number or of a word."""
MIN_SHARE = 0.8
"""Of the replies that won, those with the pattern."""
MAX_OTHERS = 0.1
"""Of the replies that did not, those with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """Replies of a kind."""

    of: Literal["words", "characters", "end"]
    parts: tuple[str, ...]
    """In a row."""
    name: str
    """For people."""

    def is_in(self, rollout: dict[str, Any]) -> bool:
        """Whether it is one of the reply's features, without making all of them."""
        text = _end_of(rollout)
        if self.of == "words":
            return re.search(_in_a_row(self.parts), text) is not None
        if self.of == "characters":
            return "".join(self.parts) in text[-LAST_CHARACTERS:]
        return (self.of, self.parts) in _endings(rollout, text)


Feature = tuple[Literal["words", "characters", "end"], tuple[str, ...]]
_PREFERRED = ("end", "characters", "words")
"""Of those that tell as much, the last."""


def find_pattern(won: Sequence[dict[str, Any]], lost: Sequence[dict[str, Any]]) -> Pattern | None:
    """What most of `won` have and hardly any of `lost`; the longest of those that tell them apart best."""
    won, lost = evenly(won, MAX_REPLIES), evenly(lost, MAX_REPLIES)
    counts = Counter(feature for rollout in won for feature in _features(rollout))
    likely = {feature: n / len(won) for feature, n in counts.items() if n >= MIN_SHARE * len(won)}
    others = Counter(f for rollout in lost for f in _features(rollout) if f in likely)
    apart = {
        feature: round(share - others[feature] / max(1, len(lost)), 2)
        for feature, share in likely.items()
        if others[feature] <= MAX_OTHERS * len(lost)
    }
    if not apart:
        return None
    of, parts = max(apart, key=lambda f: (apart[f], _PREFERRED.index(f[0]), len(f[1]), f[1]))
    return Pattern(of=of, parts=parts, name=_name(of, parts, won))


def _features(rollout: dict[str, Any]) -> set[Feature]:
    text = _end_of(rollout)
    found: set[Feature] = {("words", row) for row in _rows(WORD.findall(text), least=1, most=MAX_WORDS)}
    found |= {("characters", row) for row in _rows(text[-LAST_CHARACTERS:], least=2, most=MOST_IN_ROW)}
    return found | _endings(rollout, text)


def _end_of(rollout: dict[str, Any]) -> str:
    return reply_of(rollout)[-MAX_CHARACTERS:]


def _endings(rollout: dict[str, Any], text: str) -> set[Feature]:
    found: set[Feature] = set()
    if not text.strip():
        found.add(("end", ("an empty reply",)))
    if any(turn.get("finish_reason") == "length" for turn in rollout["turns"]):
        found.add(("end", ("a reply that was cut off",)))
    return found


def _rows(parts: Sequence[str], *, least: int, most: int) -> Iterable[tuple[str, ...]]:
    """All of so many in a row."""
    for num in range(least, most + 1):
        for start in range(len(parts) - num + 1):
            yield tuple(parts[start : start + num])


def _in_a_row(words: Sequence[str]) -> str:
    """Regular expression of texts in which `WORD` finds these one after another."""
    letters = [re.match(r"\w", word) is not None for word in words]
    found = r"(?<!\w)" if letters[0] else ""
    for i, word in enumerate(words):
        # Two with nothing between them were one.
        found += ("" if i == 0 else r"\s+" if letters[i - 1] and letters[i] else r"\s*") + re.escape(word)
    return found + (r"(?!\w)" if letters[-1] else "")


def _name(of: str, parts: tuple[str, ...], rollouts: Iterable[dict[str, Any]]) -> str:
    """As it stands in a reply, spaces and all."""
    if of == "end":
        return parts[0]
    if of == "characters":
        return repr("".join(parts))
    as_written = re.compile(r"\s*".join(map(re.escape, parts)))
    for rollout in rollouts:
        if match := as_written.search(reply_of(rollout)):
            return repr(match.group())
    return repr(" ".join(parts))
