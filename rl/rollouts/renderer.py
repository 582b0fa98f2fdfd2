"""Messages to tokens and back: a conversation as token ids that are only ever added to.

    opening -> completion -> continuation -> completion -> ...

What the model produced is never tokenized again; what it is told is tokenized once, when it is said. A
template (`rl/rollouts/templates/`) makes text of the messages; everything about tokens is here.
docs/renderers.md tells the kinds apart.

Shape legend: N tokens of what the model is told at once, C tokens of one completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from rl.models.tokenizer import IM_END, IM_START
from rl.rollouts.templates.chatml import NO_THOUGHTS, ChatML
from rl.rollouts.templates.template import RawText, Template
from rl.rollouts.templates.tokenizer_template import TokenizerTemplate
from rl.types import Completion, Message, Problem, Prompt


class Renderer(Protocol):
    stop_token_ids: tuple[int, ...]
    """Tokens that end a reply."""

    def opening(self, messages: Sequence[Message]) -> np.ndarray:
        """[N] int32: the messages, to where the model's reply begins."""
        ...

    def continuation(self, messages: Sequence[Message], *, after: Completion) -> np.ndarray:
        """[N] int32: everything between the last token of `after` and where the next reply begins."""
        ...

    def reply(self, text: str) -> np.ndarray:
        """[C] int32 of a demonstration, ended as the model should end it."""
        ...

    def text(self, token_ids: np.ndarray) -> str:
        """A completion ([C] int32) decoded, special tokens removed."""
        ...

    def check_multi_turn(self) -> None:
        """Raises ValueError, which says why, where a conversation cannot go on after a reply."""
        ...


@dataclass(kw_only=True, slots=True)
class RendererConfig:
    """How messages become tokens."""

    kind: Literal["template", "chatml", "qwen3", "raw"] = "template"
    """template: the tokenizer's own chat template; chatml, qwen3: ChatML as those models read it; raw: the
    text of the messages and nothing around it."""
    thinking: bool = True
    """Off lets every reply begin with an empty think block, as Qwen3's chat template does; of kinds template
    (which is told `enable_thinking`) and qwen3."""
    system: str = ""
    """A system message before every opening that has none; empty: none."""
    separator: str = "\n"
    """Of kind raw: between messages, and before those that follow a reply."""
    keep_replies: bool = False
    """Of kind template, for several turns: also take a template that writes earlier replies differently in
    hindsight (without their thoughts, trimmed); the tokens keep them as they were produced."""

    def __post_init__(self) -> None:
        if not self.thinking and self.kind not in ("template", "qwen3"):
            raise ValueError(
                f"renderer.thinking=False: kind={self.kind!r} knows no thoughts; choose kind template or "
                "qwen3, or leave it on"
            )
        if self.separator != "\n" and self.kind != "raw":
            raise ValueError(
                f"renderer.separator={self.separator!r}: it is of kind raw, not of kind={self.kind!r}, whose "
                "template says what stands between messages"
            )
        if self.keep_replies and self.kind != "template":
            raise ValueError(
                f"renderer.keep_replies=True: it is of kind template; kind={self.kind!r} keeps them anyway"
            )


class TemplateRenderer:
    """Tokens by a template.

    A reply is closed by the template's end-of-turn token. Where the model did not produce it, because its
    reply was cut off or ended with another stop token (such as <|endoftext|>), a continuation begins with it:
    so every turn is closed in the same way, no token that the model produced is taken back, and none that it
    did not produce passes for its own.

    Args:
        template: makes text of messages.
        tokenizer: of Hugging Face.
        stop_token_ids: tokens that end a reply; the template's end-of-turn token is one in any case.
        system: a system message before every opening that has none; empty: none.

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
        self.end_token_id: int = tokenizer.eos_token_id if end is None else _token_id(tokenizer, end)
        self.stop_token_ids = tuple(sorted({*stop_token_ids, self.end_token_id}))

    def opening(self, messages: Sequence[Message]) -> np.ndarray:
        """[N] int32: the messages, after the system message if they have none, to where the reply begins.

        Raises:
            ValueError: there are no messages, or the template cannot render them.
        """
        if not messages:
            raise ValueError("an opening without messages: an environment must say something first")
        if self.system and all(m.role != "system" for m in messages):
            messages = [Message(role="system", content=self.system), *messages]
        return self.encode(self.template.opening(messages))

    def continuation(self, messages: Sequence[Message], *, after: Completion) -> np.ndarray:
        """[N] int32: everything between the last token of `after` and where the next reply begins.

        Raises:
            ValueError: there are no messages, or the template cannot render them after a reply; see
                `check_multi_turn`.
        """
        if not messages:
            raise ValueError("a continuation without messages: the episode is over")
        # Encoded with the end of turn in front, as tokenizers may treat the beginning of a text differently.
        token_ids = self.encode(self.template.continuation(messages))
        is_closed = len(after.token_ids) > 0 and after.token_ids[-1] == self.end_token_id
        return token_ids[1:] if is_closed else token_ids

    def reply(self, text: str) -> np.ndarray:
        """[C] int32 of a demonstration, and the end-of-turn token."""
        return np.append(self.encode(text), np.int32(self.end_token_id))

    def text(self, token_ids: np.ndarray) -> str:
        """Decoded, special tokens removed; thoughts stay, they are text that the model produced."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def encode(self, text: str) -> np.ndarray:
        """[N] int32 tokens of a piece of text, without any around it."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def check_multi_turn(self) -> None:
        """Raises ValueError, which says why, where a conversation cannot go on after a reply."""
        self.template.check_multi_turn()


def make_renderer(
    config: RendererConfig, *, tokenizer: Any, stop_token_ids: Sequence[int], multi_turn: bool = False
) -> TemplateRenderer:
    """The renderer that a config describes.

    Args:
        stop_token_ids: tokens that end a reply.
        multi_turn: whether there will be conversations of several turns.

    Raises:
        ValueError: names the tokenizer's file, or the field that does not fit it.
    """
    renderer = TemplateRenderer(
        template=make_template(config, tokenizer=tokenizer, stop_token_ids=tuple(stop_token_ids)),
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids,
        system=config.system,
    )
    if multi_turn:
        renderer.check_multi_turn()
    return renderer


def make_template(config: RendererConfig, *, tokenizer: Any, stop_token_ids: tuple[int, ...]) -> Template:
    """The template of a config's kind; see `make_renderer`."""
    if config.kind == "template":
        return TokenizerTemplate(
            tokenizer,
            stop_token_ids=stop_token_ids,
            thinking=config.thinking,
            keep_replies=config.keep_replies,
            system=bool(config.system),
        )
    if config.kind == "raw":
        return RawText(end_of_turn=tokenizer.eos_token, separator=config.separator)
    for token in (IM_START, IM_END):
        if token not in tokenizer.get_added_vocab():
            raise ValueError(
                f"renderer.kind={config.kind}: the tokenizer of {tokenizer.name_or_path} has no token "
                f"{token!r}; choose kind template or raw"
            )
    return ChatML(reply_begins="" if config.thinking else NO_THOUGHTS)


class PromptTooLongError(ValueError):
    """A prompt leaves no room for a reply."""


def render_prompt(
    problem: Problem, messages: Sequence[Message], *, renderer: Renderer, max_tokens: int
) -> Prompt:
    """The opening messages of a problem as its prompt.

    Raises:
        PromptTooLongError: names the problem: its messages leave no room for a reply.
        ValueError: names the problem: its messages cannot be rendered.
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


def _token_id(tokenizer: Any, token: str) -> int:
    token_ids = tokenizer.encode(token, add_special_tokens=False)
    if len(token_ids) != 1:
        raise ValueError(f"the tokenizer has no single token {token!r}, with which the template ends a reply")
    return int(token_ids[0])
