"""Loading of a folder's tokenizer, with errors that name the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl.models.tokenizer import load_tokenizer, stop_token_ids


def open_tokenizer(folder: Path, *, vocab_size: int | None = None) -> tuple[Any, tuple[int, ...]]:
    """Return the transformers tokenizer and the tokens that end a reply.

    Args:
        vocab_size: number of token ids of the model; None: do not check.

    Raises:
        ValueError: a file is missing or malformed, or a token id is beyond the model's vocabulary.
    """
    try:
        tokenizer = load_tokenizer(folder)
        tokenizer.encode("?", add_special_tokens=False)  # some values are read only now
        if tokenizer.eos_token_id is None:
            raise ValueError("no eos_token is named: a reply would have no end")
        stop_ids = stop_token_ids(folder, tokenizer=tokenizer)
        if not all(type(token_id) is int and token_id >= 0 for token_id in stop_ids):
            raise ValueError(f"eos_token_id of generation_config.json is not a list of token ids: {stop_ids}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"the tokenizer of {folder} cannot be used: {error}") from error
    token, token_id = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if vocab_size is not None and max(token_id, *stop_ids) >= vocab_size:
        raise ValueError(
            f"the tokenizer of {folder} has token {token!r} with id {token_id} and ends replies with "
            f"{list(stop_ids)}: the model has vocab_size={vocab_size}, so ids must be from 0 to {vocab_size - 1}"
        )
    return tokenizer, stop_ids
