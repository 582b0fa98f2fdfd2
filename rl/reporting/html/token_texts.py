"""Text of each token of a reply, by the run's tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.models.tokenizer import build_byte_tokenizer, read_tokenizer_json

TOKENIZER = "tokenizer.json"
_PART_OF_A_CHARACTER = "\ufffd"
_MOST_BYTES = 4
"""Bytes of a character in UTF-8, and so the most tokens that share one."""
_WORD_START = "▁"
"""Space in SentencePiece's vocabularies, which is lost when a token is decoded alone."""


class TokenTexts:
    """Texts of tokens; without a tokenizer, their numbers."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds.

        A character of several tokens belongs to the last of them, and the others are empty.
        """
        pieces: list[str] = []
        waiting: list[int] = []  # tokens of an incomplete character
        for token_id in token_ids:
            alone = self._text(token_id)
            if _PART_OF_A_CHARACTER not in alone:
                self._give_up(waiting, pieces)
                pieces.append(alone)
                continue
            waiting.append(token_id)
            pieces.append("")
            together = self._decode(waiting)
            if not together.endswith(_PART_OF_A_CHARACTER):
                pieces[-1] = together
                waiting.clear()
            elif len(waiting) == _MOST_BYTES:
                pieces[-_MOST_BYTES] = self._text(waiting.pop(0))
        self._give_up(waiting, pieces)
        return pieces

    def _give_up(self, waiting: list[int], pieces: list[str]) -> None:
        """Decode incomplete characters token by token."""
        if waiting:
            pieces[-len(waiting) :] = [self._text(token_id) for token_id in waiting]
            waiting.clear()

    def _text(self, token_id: int) -> str:
        if token_id not in self._alone:
            self._alone[token_id] = self._decode([token_id])
        return self._alone[token_id]

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return "".join(f"<{token_id}>" for token_id in token_ids)
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        token = self._tokenizer.id_to_token(token_ids[0]) or ""
        return f" {text}" if token.startswith(_WORD_START) and not text.startswith(" ") else text


def open_token_texts(folder: Path, values: Mapping[str, Any]) -> tuple[TokenTexts, str | None]:
    """Return the texts of a run's tokens, and a sentence if the tokenizer is missing.

    Args:
        folder: the run's folder; its exported model is tried first.
        values: values of config.json with `hf_assets_path`, null for a random model, whose tokens are bytes.
    """
    given = values.get("hf_assets_path")
    folders = [folder / "checkpoints" / "hf", *([Path(given).expanduser()] if given else [])]
    for candidate in folders:
        if (candidate / TOKENIZER).exists():
            return _open(candidate / TOKENIZER)
    if given or "hf_assets_path" not in values:
        looked = " or ".join(str(candidate) for candidate in folders)
        return TokenTexts(None), f"no {TOKENIZER} in {looked}: tokens are shown by their numbers"
    with tempfile.TemporaryDirectory() as made:
        build_byte_tokenizer(made)
        return _open(Path(made) / TOKENIZER)


def _open(file: Path) -> tuple[TokenTexts, str | None]:
    try:
        return TokenTexts(read_tokenizer_json(file)), None
    except ValueError as error:
        return TokenTexts(None), f"{error}; tokens are shown by their numbers"
