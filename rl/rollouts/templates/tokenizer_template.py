"""The tokenizer's own chat template, and what must hold of it in conversations of several turns.

A chat template renders a whole conversation at once. Here its tokens only ever grow: what follows a reply is
what the template writes after one, found by rendering a made-up conversation. That is the conversation as the
template would render it only if the template appends, which is checked when it is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from rl.models.tokenizer import IM_END, IM_START
from rl.rollouts.tokenizer import TEMPLATE, template_file
from rl.types import Message

SYSTEM = Message(role="system", content="Relay asks, you reply.")
ASKED = Message(role="user", content="What is said first?")
REPLIED = Message(role="assistant", content="This is said in reply.")
ASKED_AGAIN = Message(role="user", content="What is said then?")
REPLIED_AGAIN = Message(role="assistant", content="That is said in reply again.")
"""A conversation that no template has a reason to change; each text occurs in it once."""

REWRITTEN_REPLIES = {
    "takes the thoughts out of earlier replies": "<think>\nFirst I think.\n</think>\n\nThen I reply.",
    "trims spaces and line ends around earlier replies": "\n  The reply. \n",
}
"""Replies that templates are known to render differently once they are in the past, by what it is called."""

RENDER_ERRORS = (TemplateError, AttributeError, LookupError, TypeError, ValueError)


class TokenizerTemplate:
    """A chat template that comes with a tokenizer.

    Args:
        tokenizer: of Hugging Face.
        stop_token_ids: tokens that end a reply.
        thinking: passed as `enable_thinking` to a template that reads it.
        keep_replies: in several turns, take a template too that writes earlier replies differently in
            hindsight; the tokens keep them as they were produced.
        system: whether openings will have a system message.

    Raises:
        ValueError: names the template's file: it is missing, does not render a user's turn, or does not read
            `enable_thinking` where that is to be off.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_token_ids: tuple[int, ...] = (),
        thinking: bool = True,
        keep_replies: bool = False,
        system: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.name = _name(tokenizer)
        if not getattr(tokenizer, "chat_template", True):
            raise ValueError(
                f"tokenizer file {template_file(Path(tokenizer.name_or_path))} has no chat_template, and "
                f"there is no {TEMPLATE} beside it; add one, or choose renderer.kind=chatml, qwen3 or raw"
            )
        reads_thinking = "enable_thinking" in str(getattr(tokenizer, "chat_template", ""))
        if not thinking and not reads_thinking:
            raise ValueError(
                f"renderer.thinking=False: {self.name} does not read enable_thinking, so it cannot switch "
                "thinking off; choose renderer.kind=qwen3, or leave it on"
            )
        self.options = {"enable_thinking": thinking} if reads_thinking else {}
        if ASKED.content not in self.opening([SYSTEM, ASKED] if system else [ASKED]):
            raise ValueError(
                f"{self.name} does not render a user's turn: its text is left out (some templates of models "
                "that see images want a list of parts); take another template, or another renderer.kind"
            )
        self.end_of_turn: str | None = None
        self._refusal = ""
        """Why there cannot be several turns; empty where there can."""
        try:
            self.end_of_turn = self._find_end_of_turn(stop_token_ids)
            self._check_what_follows()
            if not keep_replies:
                self._check_replies()
        except _RefusalError as error:
            self._refusal = str(error)

    def opening(self, messages: Sequence[Message]) -> str:
        return self._render(messages)

    def continuation(self, messages: Sequence[Message]) -> str:
        self.check_multi_turn()
        follows = self._after_reply([ASKED, REPLIED, *messages])
        if self.end_of_turn is None or not follows.startswith(self.end_of_turn):
            raise ValueError(
                f"{self.name} puts {follows[:20]!r} between a reply and messages of {_roles(messages)}, but "
                f"{self.end_of_turn!r} before a user's; choose another renderer.kind"
            )
        return follows

    def check_multi_turn(self) -> None:
        if self._refusal:
            raise ValueError(
                f"{self.name} does not round-trip, which a task of several turns needs: it {self._refusal}"
            )

    def _render(self, messages: Sequence[Message], *, opens_reply: bool = True) -> str:
        told = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    told, tokenize=False, add_generation_prompt=opens_reply, **self.options
                )
            )
        except RENDER_ERRORS as error:
            what = "a user's turn" if len(told) == 1 else f"messages of {_roles(messages)}"
            raise ValueError(f"{self.name} does not render {what}: {error}") from error

    def _after_reply(self, messages: Sequence[Message], reply: Message = REPLIED) -> str:
        """What it writes after that message, which is one of them."""
        # What comes after may contain the reply's text again; what comes before cannot.
        return self._render(messages).partition(reply.content)[2]

    def _find_end_of_turn(self, stop_token_ids: tuple[int, ...]) -> str:
        """The token that it puts after a reply, so that text on its two sides is tokenized apart."""
        text = self._try_render([ASKED, REPLIED, ASKED_AGAIN])
        if text.count(REPLIED.content) != 1:
            raise _RefusalError(f"writes a reply {text.count(REPLIED.content)} times; {self._advice()}")
        follows = text.partition(REPLIED.content)[2]
        first = self._encode(follows)[:1]
        token = self.tokenizer.convert_ids_to_tokens(first)[0] if first else ""
        if token not in self.tokenizer.get_added_vocab() or not follows.startswith(token):
            raise _RefusalError(
                f"puts {follows[:20]!r} after a reply, which does not begin with a special token; "
                f"{self._advice()}"
            )
        for reply in ("reply", "reply.", "reply ", "reply\n"):
            if self._encode(reply + follows) != [*self._encode(reply), *self._encode(follows)]:
                raise _RefusalError(
                    f"ends a reply with {token!r}, and {reply + token!r} is not tokenized as {reply!r} and "
                    f"{token!r} are; {self._advice()}"
                )
        closed = self._try_render([ASKED, REPLIED], opens_reply=False).partition(REPLIED.content)[2]
        if first[0] not in stop_token_ids and not closed.startswith(token):
            raise _RefusalError(
                f"puts {token!r} after a reply, which is none of the tokens that end one "
                f"({list(stop_token_ids)}): if it does end one, add {first[0]} to eos_token_id of "
                "generation_config.json"
            )
        return token

    def _check_what_follows(self) -> None:
        """That it does not depend on what came before: it is rendered without that."""
        follows = self._after_reply([ASKED, REPLIED, ASKED_AGAIN])
        histories = {"another turn": [ASKED_AGAIN, REPLIED_AGAIN, ASKED], "a system message": [SYSTEM, ASKED]}
        for name, history in histories.items():
            try:
                other = self._after_reply([*history, REPLIED, ASKED_AGAIN])
            except ValueError:
                continue  # It has no such conversations at all, and will say so where one is met.
            if other != follows:
                raise _RefusalError(
                    f"writes what follows a reply differently where {name} came before: "
                    f"{_difference(follows, other)}; {self._advice()}"
                )

    def _check_replies(self) -> None:
        """That a conversation, once it has gone on, still begins with what it was before."""
        keep = ", or set renderer.keep_replies=True: the tokens then keep replies as they were produced"
        replies = {"writes earlier replies differently": REPLIED.content, **REWRITTEN_REPLIES}
        for what, reply in replies.items():
            said = self._try_render([ASKED]) + reply
            gone_on = self._try_render([ASKED, Message(role="assistant", content=reply), ASKED_AGAIN])
            if not gone_on.startswith(said):
                raise _RefusalError(f"{what}: {_difference(said, gone_on)}; {self._advice()}{keep}")

    def _try_render(self, messages: Sequence[Message], *, opens_reply: bool = True) -> str:
        try:
            return self._render(messages, opens_reply=opens_reply)
        except ValueError as error:
            raise _RefusalError(
                f"cannot render a conversation: {error.__cause__}; {self._advice()}"
            ) from error

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _advice(self) -> str:
        known = self.tokenizer.get_added_vocab() if hasattr(self.tokenizer, "get_added_vocab") else {}
        fitting = "qwen3 or chatml" if {IM_START, IM_END} <= set(known) else "raw"
        return f"choose renderer.kind={fitting}"


class _RefusalError(ValueError):
    """What the template does that several turns cannot have."""


def _name(tokenizer: Any) -> str:
    folder = getattr(tokenizer, "name_or_path", "")
    return (
        f"the chat template of {template_file(Path(folder))}" if folder else "the tokenizer's chat template"
    )


def _roles(messages: Sequence[Message]) -> str:
    return "roles " + ", ".join(m.role for m in messages)


def _difference(said: str, instead: str) -> str:
    """Both from a little before where they part."""
    pairs = zip(said, instead, strict=False)
    parts = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(said), len(instead)))
    start = max(parts - 20, 0)
    return f"{said[start : parts + 20]!r} becomes {instead[start : parts + 20]!r}"
