"""Templates, which turn messages into text that only grows.

Raw text, ChatML, or the tokenizer's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

from rl.models.files.tokenizer import IM_END, IM_START
from rl.rollouts.replies import CallFormat, find_open_thought, split_reply
from rl.types import Message

NO_THOUGHTS = "<think>\n\n</think>\n\n"
"""Beginning of a reply in Qwen3's own template if `enable_thinking` is false."""
SYSTEM = Message(role="system", content="Relay asks, you reply.")
ASKED = Message(role="user", content="What is said first?")
REPLIED = Message(role="assistant", content="This is said in reply.")
ASKED_AGAIN = Message(role="user", content="What is said then?")
REPLIED_AGAIN = Message(role="assistant", content="That is said in reply again.")
TOLD = Message(role="tool", content="This comes from a tool.")
PROBED_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_of_tools",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}
PROBED_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "probe_of_tools", "arguments": {"key": "value"}}}
    ],
}
"""Probe conversation that no template has a reason to change; each text occurs in it once."""

REWRITTEN_REPLIES = {
    "takes the thoughts out of earlier replies": (
        "<think>\nFirst I think.\n</think>\n\nThen I reply."
    ),
    "trims spaces and line ends around earlier replies": "\n  The reply. \n",
}
"""Replies that some templates render differently once they are in the past, by a description of
that.
"""


def list_render_errors() -> tuple[type[Exception], ...]:
    """Return what a template may raise."""
    # Imported here: 0.15 s, and nothing else of a config needs it.
    from jinja2 import TemplateError

    return TemplateError, AttributeError, LookupError, TypeError, ValueError


@dataclass(frozen=True, kw_only=True, slots=True)
class RawText:
    """The bare text of the messages; a reply follows directly."""

    end_of_turn: str
    separator: str = "\n"
    """Text between messages, and between a reply and the next message."""
    tool_framing: ClassVar[str] = ""
    opens_thought: ClassVar[str] = ""
    call_format: ClassVar[CallFormat] = "hermes"
    reads_tools: ClassVar[bool] = False

    @property
    def framing(self) -> str:
        return self.end_of_turn

    def render_opening(self, messages: Sequence[Message]) -> str:
        return self.separator.join(m.content for m in messages)

    def render_continuation(self, messages: Sequence[Message]) -> str:
        return self.end_of_turn + self.separator + self.render_opening(messages)

    def check_multi_turn(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatML:
    """ChatML of Qwen2.5 and Qwen3, without a system message of its own.

    As in Qwen's templates, consecutive messages of role "tool" share one user turn, each in
    `<tool_response>`. Unlike in Qwen3's own template, earlier replies keep their thoughts, because
    the token sequence only grows.
    """

    end_of_turn: ClassVar[str] = IM_END
    framing: ClassVar[str] = f"{IM_START}{IM_END}"
    tool_framing: ClassVar[str] = "<tool_response></tool_response>"
    opens_thought: ClassVar[str] = ""
    call_format: ClassVar[CallFormat] = "hermes"
    reads_tools: ClassVar[bool] = False

    reply_begins: str = ""
    """Text at the beginning of every reply: `NO_THOUGHTS` for Qwen3 without thinking."""

    def render_opening(self, messages: Sequence[Message]) -> str:
        text = ""
        for of_tools, run in groupby(messages, key=lambda m: m.role == "tool"):
            if of_tools:
                text += f"{IM_START}user"
                for m in run:
                    text += f"\n<tool_response>\n{m.content}\n</tool_response>"
                text += f"{IM_END}\n"
            else:
                for m in run:
                    text += f"{IM_START}{m.role}\n{m.content}{IM_END}\n"
        return f"{text}{IM_START}assistant\n{self.reply_begins}"

    def render_continuation(self, messages: Sequence[Message]) -> str:
        return f"{IM_END}\n{self.render_opening(messages)}"

    def check_multi_turn(self) -> None:
        pass


class TokenizerTemplate:
    """The chat template that comes with a tokenizer.

    A chat template renders a whole conversation at once, but here tokens only ever grow. The text
    that follows a reply is found by rendering a probe conversation; that is right only if the
    template appends, which is checked here. `thinking` and `keep_replies` as in `RendererConfig`;
    `system`: openings will have a system message.

    Raises:
        ValueError: the template is missing, does not render a user's turn, or does not read
            `enable_thinking` although `thinking` is off; names its folder.
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
        self.name = f"the chat template of {tokenizer.name_or_path}"
        template = getattr(tokenizer, "chat_template", "")
        if not template:
            raise ValueError(
                f"{self.name} is missing; add one, or choose renderer.kind=chatml, qwen3 or raw"
            )
        # An option that a template does not read is ignored without a word.
        reads_thinking = "enable_thinking" in str(template)
        if not thinking and not reads_thinking:
            raise ValueError(
                f"renderer.thinking=False: {self.name} does not read enable_thinking; choose "
                "renderer.kind=qwen3"
            )
        self.options = {"enable_thinking": thinking} if reads_thinking else {}
        opening = self.render_opening([SYSTEM, ASKED] if system else [ASKED])
        if ASKED.content not in opening:
            raise ValueError(
                f"{self.name} does not render a user's turn: its text is left out; choose another "
                "renderer.kind"
            )
        self.opens_thought = find_open_thought(opening.rpartition(ASKED.content)[2])
        probes = ([SYSTEM, ASKED, REPLIED, ASKED_AGAIN], [ASKED, REPLIED, ASKED_AGAIN], [ASKED])
        # The first that the template accepts and frames: some refuse a system message, some a
        # second question.
        self.framing = next(filter(None, map(self._find_framing, probes)), "")
        self.tool_framing = self._find_framing([ASKED, REPLIED, TOLD])
        call_format = self._find_call_format()
        self.call_format: CallFormat = call_format or "hermes"
        # Tools are announced in a form that is read here, or not by the template.
        self.reads_tools = call_format is not None and self._has_tool_announcement()
        # A template that cannot continue a conversation still serves tasks of a single turn, so
        # the reason is kept until somebody asks for more.
        self.end_of_turn: str | None = None
        self._refusal = ""
        """Reason why the template cannot do several turns; empty if it can."""
        try:
            self.end_of_turn = self._find_end_of_turn(stop_token_ids)
            self._check_what_follows()
            if not keep_replies:
                self._check_replies()
        except ValueError as error:
            self._refusal = str(error)

    def render_opening(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        return self._render(messages, tools=tools)

    def render_continuation(self, messages: Sequence[Message]) -> str:
        self.check_multi_turn()
        follows = self._render_after_reply([ASKED, REPLIED, *messages])
        if self.end_of_turn is None or not follows.startswith(self.end_of_turn):
            raise ValueError(
                f"{self.name} does not put {self.end_of_turn!r} between a reply and a message of "
                f"role {messages[0].role}; choose another renderer.kind"
            )
        return follows

    def check_multi_turn(self) -> None:
        if self._refusal:
            raise ValueError(
                f"{self.name} does not round-trip, which a task of several turns needs: it "
                f"{self._refusal}; choose another renderer.kind (qwen3 or chatml where the "
                "tokenizer has their tokens, or raw)"
            )

    def _render(
        self,
        messages: Sequence[Message],
        *,
        opens_reply: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        dicts = [{"role": m.role, "content": m.content} for m in messages]
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": opens_reply}
        options |= self.options
        if tools:
            options["tools"] = list(tools)
        try:
            return str(self.tokenizer.apply_chat_template(dicts, **options))
        except list_render_errors() as error:
            roles = ", ".join(m.role for m in messages)
            raise ValueError(
                f"{self.name} does not render messages of roles {roles}: {error}"
            ) from error

    def _render_after_reply(self, messages: Sequence[Message], *, opens_reply: bool = True) -> str:
        """Return the text after the first `REPLIED`: only later text may repeat it."""
        return self._render(messages, opens_reply=opens_reply).partition(REPLIED.content)[2]

    def _find_framing(self, messages: Sequence[Message]) -> str:
        """Return the text around messages; empty if the template refuses them."""
        try:
            text = self._render(messages)
        except ValueError:
            return ""
        # A space in place of each message, so that the texts on its sides do not form a token.
        for m in messages:
            text = text.replace(m.content, " ")
        return text

    def _find_call_format(self) -> CallFormat | None:
        """Return the form of the calls that the template writes; None if it is another or none."""
        asked = {"role": ASKED.role, "content": ASKED.content}
        options = {"tokenize": False, "tools": [PROBED_TOOL], **self.options}
        try:
            text = str(self.tokenizer.apply_chat_template([asked, PROBED_CALL], **options))
        except list_render_errors():
            return None
        written = text.rpartition(ASKED.content)[2]
        # Some templates write XML between the marks of a call, which is another form.
        if any(part.kind == "call" and not part.problem for part in split_reply(written)):
            return "hermes"
        return "llama" if '"name": "probe_of_tools", "parameters"' in written else None

    def _has_tool_announcement(self) -> bool:
        try:
            return "probe_of_tools" in self._render([ASKED], tools=[PROBED_TOOL])
        except ValueError:
            return False

    def _find_end_of_turn(self, stop_token_ids: tuple[int, ...]) -> str:
        """Return the token after a reply, on whose two sides text is tokenized independently."""
        follows = self._render_after_reply([ASKED, REPLIED, ASKED_AGAIN])
        first = self._encode(follows)[:1]
        token = str(self.tokenizer.convert_ids_to_tokens(first)[0]) if first else ""
        if token not in self.tokenizer.get_added_vocab() or not follows.startswith(token):
            raise ValueError(
                f"puts {follows[:20]!r} after a reply, which does not begin with a special token"
            )
        # Tokenizers merge letters, dots and white space with what follows in different ways.
        for reply in ("reply", "reply.", "reply ", "reply\n"):
            if self._encode(reply + follows) != [*self._encode(reply), *self._encode(follows)]:
                raise ValueError(
                    f"{reply + token!r} is not tokenized as {reply!r} and {token!r} are"
                )
        closed = self._render_after_reply([ASKED, REPLIED], opens_reply=False)
        if first[0] not in stop_token_ids and not closed.startswith(token):
            raise ValueError(
                f"puts {token!r} after a reply, which is none of the tokens that end one "
                f"({list(stop_token_ids)}): if it is, add {first[0]} to eos_token_id of "
                "generation_config.json"
            )
        return token

    def _check_what_follows(self) -> None:
        """Check that the text after a reply does not depend on earlier messages."""
        follows = self._render_after_reply([ASKED, REPLIED, ASKED_AGAIN])
        for history in ([ASKED_AGAIN, REPLIED_AGAIN, ASKED], [SYSTEM, ASKED]):
            try:
                other = self._render_after_reply([*history, REPLIED, ASKED_AGAIN])
            except ValueError:
                continue  # the template refuses such conversations, and will say so in a run
            if other != follows:
                role = history[0].role
                raise ValueError(
                    f"writes what follows a reply differently after messages of {role}: "
                    f"{follows!r}, {other!r}"
                )

    def _check_replies(self) -> None:
        """Check that a longer conversation begins with the shorter one."""
        replies = {"writes earlier replies differently": REPLIED.content, **REWRITTEN_REPLIES}
        for what, reply in replies.items():
            shorter = self._render([ASKED]) + reply
            longer = self._render([ASKED, Message(role="assistant", content=reply), ASKED_AGAIN])
            if not longer.startswith(shorter):
                raise ValueError(
                    f"{what} ({shorter!r} does not begin {longer!r}); renderer.keep_replies=True "
                    "accepts that"
                )

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


Template = RawText | ChatML | TokenizerTemplate
"""Turns messages into text that only grows.

`render_opening` renders messages up to the beginning of the reply, `render_continuation` what
follows a reply, up to the next one. `end_of_turn` ends a reply; None: the tokenizer's end token.
`framing` and `tool_framing` are texts with the tokens that the template writes around the messages
of people and model, and of tools. Every reply begins with `opens_thought`: the mark of a thought
and perhaps its first words, or nothing. With `reads_tools`, `render_opening` takes descriptions of
tools and announces them; `call_format` is the form in which the model then calls them.
"""
