"""Texts that end a completion, as soon as its tokens spell one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MARGIN_TOKENS = 8
"""Decoded before the longest text that could end a completion, so that it is spelled as in the whole."""


def spells_any(texts: Sequence[str], tokens: Sequence[int], *, tokenizer: Any) -> bool:
    """Whether the last of these tokens completes one of the texts; those before it were asked about.

    A token is a byte at least, so that a text of n bytes lies within the last n tokens.
    """
    if not texts:
        return False
    num_tokens = max(len(text.encode()) for text in texts) + MARGIN_TOKENS
    said = tokenizer.decode(list(tokens[-num_tokens:]), clean_up_tokenization_spaces=False)
    return any(text in said for text in texts)
