"""Renderers: messages to tokens and back, as a token sequence that only grows.

    opening -> completion -> continuation -> completion -> ...

The model's tokens are never tokenized again, and each message is tokenized once. A template (raw
text, ChatML, or the tokenizer's own) turns messages into text; a renderer turns text into tokens.
docs/tasks.md compares the kinds. Only templates write special tokens: their texts in a message are
ordinary characters.

Shape legend: N tokens of the messages between two completions, C tokens of a completion.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from rl.models.files.tokenizer import IM_END, IM_START, find_tokens_before_text
from rl.rollouts.control_tokens import (
    ControlTokens,
    Fragment,
    RefusedMessageError,
    end_tokens,
    list_special_tokens,
    list_tokens_in,
    split_rendering,
)
from rl.rollouts.replies import continue_thought, find_opened_thought
from rl.rollouts.templates import NO_THOUGHTS, ChatML, RawText, Template, TokenizerTemplate
from rl.types import Completion, Message, Problem, Prompt

MAX_MARK_TOKENS = 24
"""Tokens at the end of a prompt in which an opened thought is looked for."""


@dataclass(kw_only=True, slots=True)
class RendererConfig:
    """Choice and options of a renderer."""

    kind: Literal["template", "chatml", "qwen3", "raw"] = "template"
    """template: the tokenizer's own chat template; chatml, qwen3: ChatML as those models read it;
    raw: the bare text of the messages."""
    thinking: bool = True
    """Off lets every reply begin with an empty think block, as Qwen3's chat template does. Only for
    the kinds template, which gets `enable_thinking`, and qwen3."""
    system: str = ""
    """System message before every opening that has none; empty: none."""
    separator: str = "\n"
    """Text between messages, and between a reply and the next message. Only for kind raw."""
    keep_replies: bool = False
    """Accept, for several turns, a template that renders earlier replies differently in hindsight
    (without their thoughts, trimmed); the tokens keep them as they were produced. Only for kind
    template."""

    def __post_init__(self) -> None:
        for option, is_set, kinds in (
            ("thinking=False", not self.thinking, ("template", "qwen3")),
            ("separator", self.separator != "\n", ("raw",)),
            ("keep_replies=True", self.keep_replies, ("template",)),
        ):
            if is_set and self.kind not in kinds:
                raise ValueError(
                    f"renderer.{option}: has no effect with kind={self.kind!r}; leave it out"
                )


class Renderer:
    """Renderer with a template.

    The template's end-of-turn token closes a reply. If the model did not produce it, because its
    reply was cut off or ended with another stop token (such as <|endoftext|>), the continuation
    begins with it. So every turn is closed in the same way, and each token is attributed to the
    side that produced it.

    Raises:
        ValueError: the template's end-of-turn token is not a single token of this tokenizer.
    """

    def __init__(
        self,
        *,
        template: Template,
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        system: str = "",
        first_token_ids: Sequence[int] = (),
    ) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.system = system
        self.first_token_ids = np.array(first_token_ids, dtype=np.int32)

        end = template.end_of_turn
        end_ids = (
            [tokenizer.eos_token_id]
            if end is None
            else tokenizer.encode(end, add_special_tokens=False)
        )
        if len(end_ids) != 1:
            raise ValueError(
                f"the template ends a reply with {end!r}, not a single token of the tokenizer"
            )

        # The end of a turn stops the generator too, whatever the model's own list says.
        self.end_token_id = int(end_ids[0])
        self.stop_token_ids = tuple(sorted({*stop_token_ids, self.end_token_id}))
        ends = end_tokens(
            tokenizer, end_token_id=self.end_token_id, stop_token_ids=self.stop_token_ids
        )
        turns = list_tokens_in(tokenizer, template.framing) | ends
        tools = list_tokens_in(tokenizer, template.tool_framing)
        self._turns = ControlTokens(tokenizer, turns)
        """Tokens that begin and end turns, which are no part of a reply."""
        self._control = ControlTokens(tokenizer, list_special_tokens(tokenizer) | tools | turns)
        """Tokens that no message can bring in."""
        # A mark that a turn's token follows is only mentioned, such as by an instruction after the
        # question.
        mentions = self._turns.find_first(template.opens_thought) is not None
        self._prefilled = "" if mentions else template.opens_thought
        self._opened: tuple[np.ndarray | None, str] = (None, "")
        """Prompt that was asked for last, and the thought that it opened."""

    def opening(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray:
        """Return [N] int32: the messages up to the beginning of the reply.

        A system message comes first, if there is one. `tools` are announced by the template, which
        must read them (`reads_tools`), as `rl.tools.tool.describe` describes them.

        Raises:
            RefusedMessageError: a message or a tool contains the text of a special token, and
                cannot be encoded without that token.
        """
        if not messages:
            raise ValueError(
                "an opening without messages: the environment must open with at least one"
            )
        if self.system and all(m.role != "system" for m in messages):
            messages = [Message(role="system", content=self.system), *messages]
        first_ids = self.first_token_ids
        if len(first_ids) and isinstance(self.template, RawText):
            # Some prompts were written with the first token in them, which stands there once.
            written = "".join(self.tokenizer.convert_ids_to_tokens(first_ids.tolist()))
            first = replace(messages[0], content=messages[0].content.removeprefix(written))
            messages = [first, *messages[1:]]
        render: Callable[[Sequence[Message]], str] = self.template.render_opening
        if tools:
            assert isinstance(self.template, TokenizerTemplate)
            self._check_tools(tools)
            render = partial(self.template.render_opening, tools=tools)
        token_ids = self._encode_messages(messages, render)
        # A template of a user's own may write the first token itself.
        if np.array_equal(token_ids[: len(first_ids)], first_ids):
            return token_ids
        return np.concatenate([first_ids, token_ids])

    def continuation(self, messages: Sequence[Message], *, after: Completion) -> np.ndarray:
        """Return [N] int32: everything between the last token of `after` and the next reply."""
        if not messages:
            raise ValueError("a continuation without messages: the episode is over")
        # Encoded with the end of turn in front: tokenizers may treat the beginning of a text
        # differently.
        token_ids = self._encode_messages(messages, self.template.render_continuation)
        is_closed = len(after.token_ids) > 0 and after.token_ids[-1] == self.end_token_id
        return token_ids[1:] if is_closed else token_ids

    def reply(self, text: str, *, prompt_ids: np.ndarray | None = None) -> np.ndarray:
        """Return [C] int32: a demonstrated reply after a prompt, and the end-of-turn token.

        Tokens that a model writes in its replies (`<think>`, `<tool_call>`) are tokens, those of
        turns are text.
        """
        text = continue_thought(text, self.find_opened_thought(prompt_ids))
        token = self._turns.find_first(text)
        if token is None:
            token_ids = self.encode(text)
        else:
            self._turns.warn_once(token, where="a demonstrated reply")
            token_ids = np.asarray(self._turns.encode([Fragment(text, True)]), dtype=np.int32)
        return np.append(token_ids, np.int32(self.end_token_id))

    def text(self, token_ids: np.ndarray, *, prompt_ids: np.ndarray | None = None) -> str:
        """Decode a completion, without the tokens that open and end turns.

        Everything else that the model wrote stays, other special tokens too. If its prompt ended in
        an opened thought, the text begins with that thought, so that readers can tell it from the
        answer.
        """
        # The last token ends the turn, unless the reply was cut off.
        of_turns, ids = self._turns.token_ids, token_ids.tolist()
        if ids and ids[-1] in of_turns:
            ids.pop()
        # Nearly every reply has only that one, and this runs for each reply in the event loop.
        if not of_turns.isdisjoint(ids):
            ids = [token_id for token_id in ids if token_id not in of_turns]
        return self.find_opened_thought(prompt_ids) + self._decode(ids)

    def encode(self, text: str) -> np.ndarray:
        """Return [N] int32: the tokens of a text, without special tokens around it."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def _check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raise RefusedMessageError if a description contains the text of a special token."""
        for tool in tools:
            token = self._control.find_first(json.dumps(tool, ensure_ascii=False))
            if token is not None:
                raise RefusedMessageError(
                    f"the text of the special token {token!r} stands in the description of the "
                    f"tool {tool['function']['name']!r}: remove the text"
                )

    def _encode_messages(
        self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
    ) -> np.ndarray:
        """Return [N] int32: the tokens of rendered messages, none with a special token."""
        token = self._control.find_first("".join(m.content for m in messages))
        if token is None:
            return self.encode(render(messages))
        self._control.warn_once(token, where="a message")
        fragments = split_rendering(messages, render=render, control=self._control)
        return np.asarray(self._control.encode(fragments), dtype=np.int32)

    def find_opened_thought(self, prompt_ids: np.ndarray | None) -> str:
        """Return the thought in which a prompt ends, from its mark on; or nothing."""
        if prompt_ids is None:
            return ""
        known_ids, opened = self._opened
        if prompt_ids is not known_ids:  # the samples of a group share one prompt
            end = self._decode(prompt_ids[-MAX_MARK_TOKENS - len(self._prefilled) :].tolist())
            opened = self._prefilled if end.endswith(self._prefilled) else ""
            opened = opened or find_opened_thought(end)
            self._opened = (prompt_ids, opened)
        return opened

    def _decode(self, token_ids: list[int]) -> str:
        # The clean-up of spaces would change what the model wrote.
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(token_ids, **options))

    def check_multi_turn(self) -> None:
        """Raise ValueError with the reason if a conversation cannot continue after a reply."""
        self.template.check_multi_turn()


def make_renderer(
    config: RendererConfig, *, tokenizer: Any, stop_token_ids: Sequence[int]
) -> Renderer:
    """Return the renderer of a config; `stop_token_ids` end a reply."""
    template: Template
    first_token_ids = find_tokens_before_text(tokenizer)
    if config.kind == "template":
        first_token_ids = ()  # the template writes them
        template = TokenizerTemplate(
            tokenizer,
            stop_token_ids=tuple(stop_token_ids),
            thinking=config.thinking,
            keep_replies=config.keep_replies,
            system=bool(config.system),
        )
    elif config.kind == "raw":
        template = RawText(end_of_turn=tokenizer.eos_token, separator=config.separator)
    else:
        missing = {IM_START, IM_END} - set(tokenizer.get_added_vocab())
        if missing:
            raise ValueError(
                f"renderer.kind={config.kind}: the tokenizer of {tokenizer.name_or_path} has no "
                f"token {' or '.join(sorted(missing))}; choose kind template or raw"
            )
        template = ChatML(reply_begins="" if config.thinking else NO_THOUGHTS)
    return Renderer(
        template=template,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids,
        system=config.system,
        first_token_ids=first_token_ids,
    )


class PromptTooLongError(ValueError):
    """A prompt leaves no room for a reply."""


def render_prompt(
    problem: Problem, messages: Sequence[Message], *, renderer: Renderer, max_tokens: int
) -> Prompt:
    """Render the opening messages of a problem.

    Raises:
        PromptTooLongError: they leave no room for a reply.
        RefusedMessageError: one contains the text of a special token, and cannot be encoded without
            that token.
    """
    try:
        token_ids = renderer.opening(messages)
    except ValueError as error:
        kind = RefusedMessageError if isinstance(error, RefusedMessageError) else ValueError
        raise kind(f"the prompt of problem {problem.id!r}: {error}") from error
    if len(token_ids) > max_tokens:
        raise PromptTooLongError(
            f"the prompt of problem {problem.id!r} has {len(token_ids)} tokens; the context leaves "
            f"room for {max_tokens} (generator.max_model_len or loop.episode.max_tokens less "
            "loop.sampling.max_tokens)"
        )
    return Prompt(problem=problem, token_ids=token_ids)
