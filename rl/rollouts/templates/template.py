"""What a template is, and the plainest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rl.types import Message


class Template(Protocol):
    """Turns messages into text.

    What follows a reply must not depend on what came before it: so the text of a conversation only grows.
    """

    @property
    def end_of_turn(self) -> str | None:
        """The token that ends a reply; None: the tokenizer's end token."""
        ...

    def opening(self, messages: Sequence[Message]) -> str:
        """The messages, to where the reply begins.

        Raises:
            ValueError: they cannot be rendered.
        """
        ...

    def continuation(self, messages: Sequence[Message]) -> str:
        """What follows a reply: its end-of-turn token, the messages, and all to where the next reply begins.

        Raises:
            ValueError: they cannot be rendered, or what `check_multi_turn` says.
        """
        ...

    def check_multi_turn(self) -> None:
        """Raises ValueError, which says why, where the template is not for conversations of several turns."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RawText:
    """The messages' text and nothing around it; a reply follows directly."""

    end_of_turn: str
    separator: str = "\n"
    """Between messages, and before those that follow a reply."""

    def opening(self, messages: Sequence[Message]) -> str:
        return self.separator.join(m.content for m in messages)

    def continuation(self, messages: Sequence[Message]) -> str:
        return self.end_of_turn + self.separator + self.opening(messages)

    def check_multi_turn(self) -> None:
        """Nothing in it depends on earlier turns."""
