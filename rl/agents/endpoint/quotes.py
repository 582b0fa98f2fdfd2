"""Recorded replies that a rewritten history quotes.

Replies that are equal as messages, such as "yes", may differ in their tokens: in their thoughts, or
because the model has written them in another way. So each message of the assistant is looked for in
the conversation that the history rewrites, in its order:

    recorded    s  u1 yes(0)  u2 yes(1)  u3 no(2)
    history     summary of u1,  u2 yes(1),  u3 no(2),  u4
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl.agents.endpoint.canonical import digest_message
from rl.agents.endpoint.turns import RecordedTurn
from rl.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reply:
    """A message of the assistant in a history."""

    before: Message | None
    """Message that it replies to."""
    numbers: Sequence[int]
    """Turns with an equal reply, in the order in which they were recorded."""


@dataclass(kw_only=True, eq=False)
class Quotes:
    """Replies of a record by their canonical form."""

    turns: Mapping[int, RecordedTurn]
    """Answered turns by number."""
    _numbers: dict[bytes, list[int]] = field(default_factory=dict)
    """Turns with a reply, by its digest, in the order in which they were recorded."""

    def add(self, reply: bytes, *, number: int) -> None:
        """Note the digest of a turn's reply."""
        self._numbers.setdefault(reply, []).append(number)

    def find_origin(self, messages: Sequence[Message], *, opening: bytes) -> int | None:
        """Return the turn of the last reply that a history quotes; None if it quotes none.

        Of several the one whose conversation has most of the other quotes, then that with the
        digest `opening`, then the last.
        """
        replies = self._list_replies(messages)
        while replies and not replies[-1].numbers:
            replies.pop()
        if not replies:
            return None
        best, most = None, (-1, -1, False)
        seen: set[int] = set()
        for number in reversed(replies[-1].numbers):
            # A conversation that goes on after this reply has been looked at from its later end.
            if number in seen:
                continue
            line = self._list_line(number)
            seen.update(line)
            matched = self._match(replies, line)
            num_in_place = 0
            for reply, found in zip(replies, matched, strict=True):
                num_in_place += found is not None and self._is_in_place(reply, found)
            num_matched = sum(found is not None for found in matched)
            has_opening = self.turns[number].plan.digests.opening == opening
            if (num_matched, num_in_place, has_opening) > most:
                best, most = matched[-1], (num_matched, num_in_place, has_opening)
        return best

    def find_turns(self, messages: Sequence[Message], *, origin: int | None) -> list[int | None]:
        """Return the turn that each message of the assistant quotes; None if it quotes none.

        The conversation of `origin` is the one that the history rewrites. Replies that it does not
        have are those of others, the last first. No turn is quoted twice if there is another.
        """
        replies = self._list_replies(messages)
        matched = self._match(replies, self._list_line(origin))
        used = {number for number in matched if number is not None}
        for place in reversed(range(len(replies))):
            numbers = replies[place].numbers
            if matched[place] is None and numbers:
                number = next((n for n in reversed(numbers) if n not in used), numbers[-1])
                matched[place] = number
                used.add(number)
        return matched

    def _list_replies(self, messages: Sequence[Message]) -> list[_Reply]:
        replies = []
        before: Message | None = None
        for m in messages:
            if m.role == "assistant":
                numbers = self._numbers.get(digest_message(m), ())
                replies.append(_Reply(before=before, numbers=numbers))
            before = m
        return replies

    def _list_line(self, number: int | None) -> list[int]:
        """Return a turn and those before it, also of the conversations that were rewritten."""
        line = []
        while number is not None and number in self.turns:
            line.append(number)
            plan = self.turns[number].plan
            number = plan.origin if plan.parent is None else plan.parent
        return line

    def _match(self, replies: Sequence[_Reply], line: Sequence[int]) -> list[int | None]:
        """Return the turn of each reply on a line of turns, in its order; None if it has none.

        Both are read from their ends, since what is left out of a history is mostly its beginning.
        """
        places = {number: place for place, number in enumerate(line)}
        matched: list[int | None] = [None] * len(replies)
        begin = 0
        for i in reversed(range(len(replies))):
            on_line = []
            for number in replies[i].numbers:
                place = places.get(number, -1)
                if place >= begin:
                    # Replies to the same message first, then the next on the line.
                    on_line.append((not self._is_in_place(replies[i], number), place))
            if on_line:
                _, place = min(on_line)
                matched[i] = line[place]
                begin = place + 1
        return matched

    def _is_in_place(self, reply: _Reply, number: int) -> bool:
        """Return whether a turn replies to the same message as a reply."""
        return self.turns[number].plan.messages[-1] == reply.before
