"""A folder's tokenizer with what rollouts need of it: a chat template and an end of turn.

The folder may be anybody's; what is wrong with it is said by file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from rl.models.hf import read_json_object
from rl.models.tokenizer import check_tokenizer_files, load_tokenizer, stop_token_ids

CONFIG, END_IDS, TEMPLATE = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
OLDER_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Of older versions of transformers; still read where they are."""


def open_tokenizer(folder: Path) -> tuple[Any, tuple[int, ...]]:
    """The transformers tokenizer, and the tokens that end a reply.

    Raises:
        ValueError: names the file that is missing or malformed, and what is wrong with it.
    """
    check_tokenizer_files(folder)
    beside = [name for name in (END_IDS, *OLDER_FILES) if (folder / name).exists()]
    contents = {name: read_json_object(folder / name) for name in (CONFIG, *beside)}
    _check_end_ids(folder / END_IDS, contents.get(END_IDS, {}).get("eos_token_id"))
    tokenizer = _load(folder, older=[name for name in beside if name in OLDER_FILES])
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer file {folder / CONFIG} names no eos_token: a reply would have no end")
    _check_template(folder, tokenizer)
    return tokenizer, stop_token_ids(folder, tokenizer=tokenizer)


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


def _check_template(folder: Path, tokenizer: Any) -> None:
    file = folder / TEMPLATE if (folder / TEMPLATE).exists() else folder / CONFIG
    if not tokenizer.chat_template:
        raise ValueError(f"tokenizer file {file} has no chat_template, and there is no {TEMPLATE} beside it")
    messages = [{"role": "user", "content": "?"}]
    try:
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"the chat template of {file} does not render a user's turn: {error}") from error


def _check_end_ids(file: Path, ids: Any) -> None:
    listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(token_id) is int for token_id in listed):
        raise ValueError(f"tokenizer file {file}: eos_token_id={ids!r} is not a token id or a list of them")
