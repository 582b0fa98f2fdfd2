"""A folder's tokenizer with the tokens that end a reply.

The folder may be anybody's; what is wrong with it is said by file. Its chat template is looked at by the
renderer that uses it (`rl/rollouts/templates/tokenizer_template.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl.models.hf import read_json_object
from rl.models.tokenizer import check_tokenizer_files, load_tokenizer, stop_token_ids

CONFIG, END_IDS, TEMPLATE = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
OLDER_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Of older versions of transformers; still read where they are."""


def open_tokenizer(folder: Path, *, vocab_size: int | None = None) -> tuple[Any, tuple[int, ...]]:
    """The transformers tokenizer, and the tokens that end a reply.

    Args:
        vocab_size: of the model, which has a row for each token id below it; None for any.

    Raises:
        ValueError: names the file that is missing or malformed, and what is wrong with it.
    """
    check_tokenizer_files(folder)
    _check_text(folder / TEMPLATE)
    beside = [name for name in (END_IDS, *OLDER_FILES) if (folder / name).exists()]
    contents = {name: read_json_object(folder / name) for name in (CONFIG, *beside)}
    _check_end_ids(folder / END_IDS, contents.get(END_IDS, {}).get("eos_token_id"))
    tokenizer = _load(folder, older=[name for name in beside if name in OLDER_FILES])
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer file {folder / CONFIG} names no eos_token: a reply would have no end")
    stop_ids = stop_token_ids(folder, tokenizer=tokenizer)
    if vocab_size is not None:
        _check_vocabulary(folder, tokenizer, stop_ids, vocab_size=vocab_size)
    return tokenizer, stop_ids


def _load(folder: Path, *, older: list[str]) -> Any:
    try:
        tokenizer = load_tokenizer(folder)
        tokenizer.encode("?", add_special_tokens=False)  # some values are looked at only now
        return tokenizer
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if str(folder) in str(error):  # it says already which file it is
            raise
        # transformers does not say which value it stumbled over, nor in which file.
        files = " or ".join([str(folder / CONFIG), *older])
        raise ValueError(f"tokenizer file {files} has a value that transformers refuses: {error}") from error


def _check_text(file: Path) -> None:
    try:
        if file.exists():
            file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"tokenizer file {file} is not text in UTF-8: {error}") from error


def _check_vocabulary(folder: Path, tokenizer: Any, stop_ids: tuple[int, ...], *, vocab_size: int) -> None:
    valid = f"the model has vocab_size={vocab_size}, so ids must be from 0 to {vocab_size - 1}"
    token, token_id = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if token_id >= vocab_size:
        raise ValueError(f"tokenizer folder {folder}: token {token!r} has id {token_id}; {valid}")
    outside = [i for i in stop_ids if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(f"tokenizer file {folder / END_IDS}: eos_token_id has {outside[0]}; {valid}")


def _check_end_ids(file: Path, ids: Any) -> None:
    listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(token_id) is int for token_id in listed):
        raise ValueError(f"tokenizer file {file}: eos_token_id={ids!r} is not a token id or a list of them")


def template_file(folder: Path) -> Path:
    """Where a tokenizer's chat template comes from."""
    return folder / TEMPLATE if (folder / TEMPLATE).exists() else folder / CONFIG
