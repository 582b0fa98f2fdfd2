"""Special tokens in texts that may not contain any: messages, and demonstrated replies.

A tokenizer turns the text `<|im_end|>` into the token that ends a turn, whoever wrote the text.
Only a template may write that token. In everything else its text is encoded as ordinary characters.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rl.rollouts.replies import THOUGHT_MARKS
from rl.types import Message

logger = logging.getLogger(__name__)

TRIMMED: tuple[Callable[[str], str], ...] = (str, str.strip, str.rstrip, str.lstrip)
"""Changes that chat templates make to a message without changing its words."""
_MARKUP = re.compile(r"[<\[{◁].*[>\]}▷]", re.DOTALL)
"""Form of a token that is no word and no white space, for tokens that are not marked as special."""
_THOUGHTS = (*THOUGHT_MARKS, *THOUGHT_MARKS.values())
_CLOSING_TAG = re.compile(r"</[\w-]+>|\[/[\w-]+\]")
"""Form of a token that closes a part of a reply, such as `</answer>` and `</tool_call>`."""


class RefusedMessageError(ValueError):
    """A message contains the text of a special token, and cannot be encoded without that token."""


class Fragment(NamedTuple):
    """A part of a rendered conversation."""

    text: str
    is_content: bool
    """True if a message wrote the text, False if the template did."""


def list_added_tokens(tokenizer: Any) -> dict[int, tuple[str, bool]]:
    """Return text and mark "special" of each added token that is more than white space, by id."""
    tokens: dict[int, tuple[str, bool]] = {}
    decoder = getattr(tokenizer, "added_tokens_decoder", None)
    if decoder is None:
        # A tokenizer of a user's own may not tell; then every added token counts as special.
        for text, token_id in tokenizer.get_added_vocab().items():
            tokens[token_id] = (text, True)
    else:
        for token_id, token in decoder.items():
            tokens[token_id] = (token.content, bool(token.special))

    for token_id, (text, _) in list(tokens.items()):
        # Messages are full of white space, which begins and ends nothing.
        if not text.strip(" \t\r\n"):
            del tokens[token_id]
    return tokens


def list_special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the tokens that are marked as special, by text."""
    ids = {}
    for token_id, (text, special) in list_added_tokens(tokenizer).items():
        if special:
            ids[text] = token_id
    return ids


def list_tokens_in(tokenizer: Any, text: str) -> dict[str, int]:
    """Return the ids of the added tokens in a template's text, by text.

    Marks of thoughts and words are left out.
    """
    candidates: dict[str, int] = {}
    for token_id, (token, special) in list_added_tokens(tokenizer).items():
        # A model writes the marks of its thoughts itself, so they may stand in a reply.
        is_thought = any(token in mark for mark in _THOUGHTS)
        if (special or _MARKUP.fullmatch(token)) and not is_thought:
            candidates[token] = token_id

    ids = {}
    for _, token in ControlTokens(tokenizer, candidates).find(text):
        ids[token] = candidates[token]
    return ids


def end_tokens(
    tokenizer: Any, *, end_token_id: int, stop_token_ids: Iterable[int]
) -> dict[str, int]:
    """Return the ids of the tokens that begin, end and pad texts, by text.

    Special tokens that end replies are among them.

    A stop token that closes a part of the reply (`</answer>`) is left out: without that token, the
    part has no end.
    """
    added = list_added_tokens(tokenizer)
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    chosen = {end_token_id, *(getattr(tokenizer, name, None) for name in names)}
    # Some models stop at the end of an answer or a call, which is a part of the reply.
    for token_id in stop_token_ids:
        text, special = added.get(token_id, ("", False))
        if special and not _CLOSING_TAG.fullmatch(text):
            chosen.add(token_id)
    return {added[token_id][0]: token_id for token_id in chosen if token_id in added}


class ControlTokens:
    """Tokens that only a template may write.

    Args:
        ids: the id of each token by its text.
    """

    def __init__(self, tokenizer: Any, ids: Mapping[str, int]) -> None:
        self.tokenizer = tokenizer
        self.ids = dict(ids)
        self.token_ids = frozenset(ids.values())
        # Two characters tell nearly all places without a token, also in a text full of angle
        # brackets.
        beginnings = sorted({text[:2] for text in ids}, key=len, reverse=True)
        self._beginning = re.compile(f"(?={'|'.join(map(re.escape, beginnings))})") if ids else None
        self._lengths = sorted({len(text) for text in ids}, reverse=True)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = getattr(backend, "normalizer", None)
        self._copy: Any = None
        self._stand_ins: dict[str, str] = {}
        """Text that stands for a template's own token in `_copy`, by the token's text."""
        self._nonce = secrets.token_hex(8)
        self._has_warned = False

    def find(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield place and text of each token in a text, from left to right, the longest first."""
        end = 0
        for candidate in () if self._beginning is None else self._beginning.finditer(text):
            start = candidate.start()
            if start < end:
                continue
            # There may be thousands of tokens, but they have few lengths.
            for length in self._lengths:
                token = text[start : start + length]
                if token in self.ids:
                    yield start, token
                    end = start + len(token)
                    break

    def find_first(self, text: str) -> str | None:
        """Return the first token that a text would bring in, or None."""
        _, token = next(self.find(text), (0, None))
        if token is None and self._normalizer is not None:
            # Other characters may become a token's text.
            _, token = next(self.find(self._normalizer.normalize_str(text)), (0, None))
        return token

    def encode(self, fragments: Sequence[Fragment]) -> list[int]:
        """Return the tokens of a text.

        Only the template's own fragments may contain the tokens of this object.

        Raises:
            RefusedMessageError: the tokenizer has no other way to write a token's text.
        """
        text = ""
        for fragment in fragments:
            text += fragment.text if fragment.is_content else self._insert_stand_ins(fragment.text)
        # After the text, because a stand-in is added to the copy when it is first needed.
        real_ids = {}
        for token, name in self._stand_ins.items():
            real_ids[self._open_copy().token_to_id(name)] = self.ids[token]

        encoded = self._open_copy().encode(text, add_special_tokens=False).ids
        # Unknown characters in a message are no attempt to end a turn.
        forbidden = self.token_ids - {getattr(self.tokenizer, "unk_token_id", None)}
        brought_in = forbidden.intersection(encoded)
        if brought_in:
            names = sorted(token for token, token_id in self.ids.items() if token_id in brought_in)
            raise RefusedMessageError(
                f"the text of the special token {names[0]!r} stands in a message, and the "
                f"tokenizer of {self.tokenizer.name_or_path} has no other tokens for it: remove "
                "the text"
            )
        return [real_ids.get(token_id, token_id) for token_id in encoded]

    def warn_once(self, token: str, *, where: str) -> None:
        """Log that a text contains a token's text, the first time."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s contains the text of the special token %r: such texts are read as ordinary "
                "characters, here and in what follows",
                where,
                token,
            )

    def _insert_stand_ins(self, text: str) -> str:
        """Return a template's text with a stand-in for each of its tokens."""
        parts, end = [], 0
        for start, token in self.find(text):
            parts += [text[end:start], self._make_stand_in(token)]
            end = start + len(token)
        return "".join([*parts, text[end:]])

    def _make_stand_in(self, token: str) -> str:
        """Return a text that the copy reads as one token, as the tokenizer reads `token`."""
        if token not in self._stand_ins:
            from tokenizers import AddedToken

            own = self.tokenizer.added_tokens_decoder[self.ids[token]]
            name = f"<{self._nonce}-{len(self._stand_ins)}>"
            stripped = {"lstrip": own.lstrip, "rstrip": own.rstrip}
            self._open_copy().add_tokens(
                [AddedToken(name, normalized=False, special=False, **stripped)]
            )
            self._stand_ins[token] = name
        return self._stand_ins[token]

    def _open_copy(self) -> Any:
        """Return a copy of the tokenizer to which these tokens' texts are ordinary characters."""
        if self._copy is None:
            from tokenizers import Tokenizer

            backend = getattr(self.tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise RefusedMessageError(
                    f"the text of a special token stands in a message, and the tokenizer of "
                    f"{self.tokenizer.name_or_path} cannot read it as ordinary characters: remove "
                    "it"
                )
            settings = json.loads(backend.to_str())
            for token in settings["added_tokens"]:
                token["special"] = token["content"] in self.ids
            if settings["model"]["type"] == "Unigram":
                # Such a vocabulary has these texts as words, too; ids are places in it.
                vocabulary = settings["model"]["vocab"]
                for token_id in self.token_ids - {settings["model"].get("unk_id")}:
                    if token_id < len(vocabulary):
                        vocabulary[token_id][0] = f"<{self._nonce}-{token_id}>"
            self._copy = Tokenizer.from_str(json.dumps(settings))
            self._copy.no_truncation()
            self._copy.no_padding()
            self._copy.encode_special_tokens = True
        return self._copy


def split_rendering(
    messages: Sequence[Message],
    *,
    render: Callable[[Sequence[Message]], str],
    control: ControlTokens,
) -> list[Fragment]:
    """Return a rendered conversation, with everything apart that could bring in a token.

    Raises:
        RefusedMessageError: the template changes such a message, so that it cannot be found again.
    """
    # A conversation with a mark in place of each unsafe message shows what the template writes
    # around them. The nonce keeps a message from containing a mark.
    nonce = secrets.token_hex(8)
    marked = list(messages)
    for number in _find_unsafe(messages, control):
        marked[number] = replace(marked[number], content=f"{nonce}-{number}-")
    text = render(messages)
    before, *rest = re.split(rf"{nonce}-(\d+)-", render(marked))
    fragments, position = [Fragment(before, False)], len(before)
    for place, after in zip(rest[::2], rest[1::2], strict=True):
        number = int(place)
        content = _find_content(text, messages[number].content, after=after, position=position)
        fragments += [Fragment(content, True), Fragment(after, False)]
        position += len(content) + len(after)
    if _join(fragments) == text:
        return fragments

    framing = [before, *rest[1::2]]
    # The template changes a message, such as quotes for JSON. The text of the token itself may be
    # found again.
    fragments = _split_at_tokens(messages, render=render, control=control)
    template_texts = []
    for fragment in fragments:
        if not fragment.is_content:
            template_texts.append(fragment.text)
    has_same_tokens = _list_tokens(template_texts, control) == _list_tokens(framing, control)
    if has_same_tokens and _join(fragments) == text:
        return fragments
    # The template may also take out the text of the token, such as that of thoughts in earlier
    # replies.
    if _list_tokens([text], control) == _list_tokens(framing, control):
        return [Fragment(text, False)]
    tokens = [control.find_first(m.content) for m in messages]
    first = next(filter(None, tokens), "")
    raise RefusedMessageError(
        f"the template changes a message that contains the text of the special token {first!r}, so "
        "that the message cannot be read apart from it: remove the text, or choose another "
        "renderer.kind"
    )


def _find_unsafe(messages: Sequence[Message], control: ControlTokens) -> set[int]:
    """Return the numbers of the messages that could bring in a token, alone or together."""
    unsafe: set[int] = set()
    others = ""
    for number, m in enumerate(messages):
        if control.find_first(m.content) is None:
            others += m.content
        else:
            unsafe.add(number)

    if unsafe and control.find_first(others) is None:
        return unsafe
    # Messages in a row may make a token together.
    return {number for number, m in enumerate(messages) if m.content}


def _join(fragments: Sequence[Fragment]) -> str:
    return "".join(fragment.text for fragment in fragments)


def _list_tokens(texts: Iterable[str], control: ControlTokens) -> list[str]:
    tokens = []
    for text in texts:
        for _, token in control.find(text):
            tokens.append(token)
    return tokens


def _split_at_tokens(
    messages: Sequence[Message],
    *,
    render: Callable[[Sequence[Message]], str],
    control: ControlTokens,
) -> list[Fragment]:
    """Return a rendered conversation, with the text of each token in a message apart."""
    nonce = secrets.token_hex(8)
    tokens: list[str] = []
    marked = []
    for m in messages:
        parts, end = [], 0
        for start, token in control.find(m.content):
            parts += [m.content[end:start], f"{nonce}-{len(tokens)}-"]
            tokens.append(token)
            end = start + len(token)
        marked.append(replace(m, content="".join([*parts, m.content[end:]])))
    before, *rest = re.split(rf"{nonce}-(\d+)-", render(marked))
    fragments = [Fragment(before, False)]
    for number, after in zip(rest[::2], rest[1::2], strict=True):
        fragments += [Fragment(tokens[int(number)], True), Fragment(after, False)]
    return fragments


def _find_content(text: str, content: str, *, after: str, position: int) -> str:
    """Return a message as the template wrote it at `position`, or as it is if that changed it."""
    for trim in TRIMMED:
        if text.startswith(trim(content) + after, position):
            return trim(content)
    return content
