"""Renderers: messages to tokens and back, as a token sequence that only grows.

    opening -> completion -> continuation -> completion -> ...

The model's tokens are never tokenized again, and each message is tokenized once. A template
(`rl/rollouts/templates.py`) turns messages into text; a renderer turns text into tokens. docs/tasks.md
compares the kinds.

Shape legend: N tokens of the messages between two completions, C tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rl.models.tokenizer import IM_END, IM_START
from rl.rollouts.templates import NO_THOUGHTS, ChatML, RawText, Template, TokenizerTemplate
from rl.types import Completion, Message, Problem, Prompt


@dataclass(kw_only=True, slots=True)
class RendererConfig:
    """Choice and options of a renderer."""

    kind: Literal["template", "chatml", "qwen3", "raw"] = "template"
    """template: the tokenizer's own chat template; chatml, qwen3: ChatML as those models read it; raw: the
    bare text of the messages."""
    thinking: bool = True
    """Off lets every reply begin with an empty think block, as Qwen3's chat template does. Only for the kinds
    template, which gets `enable_thinking`, and qwen3."""
    system: str = ""
    """System message before every opening that has none; empty: none."""
    separator: str = "\n"
    """Text between messages, and between a reply and the next message. Only for kind raw."""
    keep_replies: bool = False
    """Accept, for several turns, a template that renders earlier replies differently in hindsight (without
    their thoughts, trimmed); the tokens keep them as they were produced. Only for kind template."""

    def __post_init__(self) -> None:
        for option, is_set, kinds in (
            ("thinking=False", not self.thinking, ("template", "qwen3")),
            ("separator", self.separator != "\n", ("raw",)),
            ("keep_replies=True", self.keep_replies, ("template",)),
        ):
            if is_set and self.kind not in kinds:
                raise ValueError(f"renderer.{option}: has no effect with kind={self.kind!r}; leave it out")


class Renderer:
    """Renderer with a template.

    The template's end-of-turn token closes a reply. If the model did not produce it, because its reply was
    cut off or ended with another stop token (such as <|endoftext|>), the continuation begins with it. So every
    turn is closed in the same way, and each token is attributed to the side that produced it.

    Args:
        template: turns messages into text.
        tokenizer: a Hugging Face tokenizer.
        stop_token_ids: tokens that end a reply; the template's end-of-turn token always does.
        system: system message before every opening that has none; empty: none.

    Raises:
        ValueError: the template's end-of-turn token is not a single token of this tokenizer.
    """

    def __init__(
        self, *, template: Template, tokenizer: Any, stop_token_ids: Sequence[int], system: str = ""
    ) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.system = system
        end = template.end_of_turn
        end_ids = [tokenizer.eos_token_id] if end is None else tokenizer.encode(end, add_special_tokens=False)
        if len(end_ids) != 1:
            raise ValueError(f"the template ends a reply with {end!r}, not a single token of the tokenizer")
        self.end_token_id = int(end_ids[0])
        self.stop_token_ids = tuple(sorted({*stop_token_ids, self.end_token_id}))

    def opening(self, messages: Sequence[Message]) -> np.ndarray:
        """Return [N] int32: the messages, with a system message, up to the beginning of the reply."""
        if not messages:
            raise ValueError("an opening without messages: the environment must open with at least one")
        if self.system and all(m.role != "system" for m in messages):
            messages = [Message(role="system", content=self.system), *messages]
        return self.encode(self.template.opening(messages))

    def continuation(self, messages: Sequence[Message], *, after: Completion) -> np.ndarray:
        """Return [N] int32: everything between the last token of `after` and the next reply."""
        if not messages:
            raise ValueError("a continuation without messages: the episode is over")
        # Encoded with the end of turn in front: tokenizers may treat the beginning of a text differently.
        token_ids = self.encode(self.template.continuation(messages))
        is_closed = len(after.token_ids) > 0 and after.token_ids[-1] == self.end_token_id
        return token_ids[1:] if is_closed else token_ids

    def reply(self, text: str) -> np.ndarray:
        """Return [C] int32: a demonstrated reply and the end-of-turn token."""
        return np.append(self.encode(text), np.int32(self.end_token_id))

    def text(self, token_ids: np.ndarray) -> str:
        """Decode a completion without special tokens; thoughts stay."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def encode(self, text: str) -> np.ndarray:
        """Return [N] int32: the tokens of a text, without special tokens around it."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def check_multi_turn(self) -> None:
        """Raise ValueError with the reason if a conversation cannot continue after a reply."""
        self.template.check_multi_turn()


def make_renderer(config: RendererConfig, *, tokenizer: Any, stop_token_ids: Sequence[int]) -> Renderer:
    """Return the renderer of a config; `stop_token_ids` end a reply.

    Raises:
        ValueError: a field does not fit the tokenizer; names the field or the file.
    """
    template: Template
    if config.kind == "template":
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
        if missing := {IM_START, IM_END} - set(tokenizer.get_added_vocab()):
            raise ValueError(
                f"renderer.kind={config.kind}: the tokenizer of {tokenizer.name_or_path} has no token "
                f"{' or '.join(sorted(missing))}; choose kind template or raw"
            )
        template = ChatML(reply_begins="" if config.thinking else NO_THOUGHTS)
    return Renderer(
        template=template, tokenizer=tokenizer, stop_token_ids=stop_token_ids, system=config.system
    )


class PromptTooLongError(ValueError):
    """A prompt leaves no room for a reply."""


def render_prompt(
    problem: Problem, messages: Sequence[Message], *, renderer: Renderer, max_tokens: int
) -> Prompt:
    """Render the opening messages of a problem.

    Raises:
        PromptTooLongError: the messages leave no room for a reply; names the problem.
        ValueError: the messages cannot be rendered; names the problem.
    """
    try:
        token_ids = renderer.opening(messages)
    except ValueError as error:
        raise ValueError(f"the prompt of problem {problem.id!r}: {error}") from error
    if len(token_ids) > max_tokens:
        raise PromptTooLongError(
            f"the prompt of problem {problem.id!r} has {len(token_ids)} tokens; the context leaves room for "
            f"{max_tokens} (generator.max_model_len or loop.episode.max_tokens less loop.sampling.max_tokens)"
        )
    return Prompt(problem=problem, token_ids=token_ids)
