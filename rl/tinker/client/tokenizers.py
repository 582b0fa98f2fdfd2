"""Tokenizers of base models."""

from __future__ import annotations

import functools
from typing import Any


@functools.lru_cache(maxsize=8)
def tokenizer_of(folder: str) -> Any:
    """The `PreTrainedTokenizer` in a Hugging Face folder."""
    from transformers import AutoTokenizer  # only where somebody needs one: it takes a second

    return AutoTokenizer.from_pretrained(folder)
