"""ChatML as Qwen's models read it, written here instead of taken from the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rl.models.tokenizer import IM_END, IM_START
from rl.types import Message

NO_THOUGHTS = "<think>\n\n</think>\n\n"
"""What Qwen3's own template lets a reply begin with where `enable_thinking` is false."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatML:
    """ChatML of Qwen2.5 and Qwen3, without a system message of its own.

    As in Qwen's templates, consecutive messages of role "tool" share one user turn, each in
    `<tool_response>`. Replies stay as they are: Qwen3's own template takes the thoughts out of those before
    the last user message, which a sequence that only grows cannot do.
    """

    reply_begins: str = ""
    """Text that every reply is made to begin with: `NO_THOUGHTS` for Qwen3 without thinking."""

    @property
    def end_of_turn(self) -> str:
        return IM_END

    def opening(self, messages: Sequence[Message]) -> str:
        turns = [
            _tool_turn(run) if of_tools else "".join(map(_turn, run))
            for of_tools, run in groupby(messages, key=lambda m: m.role == "tool")
        ]
        return f"{''.join(turns)}{IM_START}assistant\n{self.reply_begins}"

    def continuation(self, messages: Sequence[Message]) -> str:
        return f"{IM_END}\n{self.opening(messages)}"

    def check_multi_turn(self) -> None:
        """Nothing in it depends on earlier turns."""


def _turn(message: Message) -> str:
    return f"{IM_START}{message.role}\n{message.content}{IM_END}\n"


def _tool_turn(messages: Iterable[Message]) -> str:
    responses = "".join(f"\n<tool_response>\n{m.content}\n</tool_response>" for m in messages)
    return f"{IM_START}user{responses}{IM_END}\n"
