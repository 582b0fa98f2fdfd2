"""Hugging Face tokenizers, their fingerprints, and a tokenizer of bytes for tiny models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.models.files.folder_check import CHAT_TEMPLATES, check_links, check_not_pointer
from rl.utils.files import read_json_object

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
"""Special tokens of ChatML."""
WORD_TOKENS = ("<think>", "</think>", "[ANSWER]")
"""Single tokens that are part of the text."""

SENTENCEPIECE = "tokenizer.model"
_FIRST_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "generation_config.json",
)
TOKENIZER_FILES = (
    *_FIRST_FILES,
    SENTENCEPIECE,
    "tokenizer.model.v3",
    "tekken.json",
    "vocab.txt",
    "chat_template.json",
)
"""Files of a Hugging Face folder that belong to the tokenizer, besides those in `CHAT_TEMPLATES`.

Most folders have only some of them. Checkpoints of older versions record `_FIRST_FILES` only.
"""
_SETTINGS = (
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "generation_config.json",
)

_PROBES = ("Hello world", "What is 12 + 345?", "a  b, c.", "\u00e9t\u00e9 \u4e16\u754c")
"""Texts that every conversion of a tokenizer must split alike."""

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""ChatML as Qwen3 writes it. Earlier turns stay verbatim, thoughts included, so that a
conversation's tokens are a prefix of its continuation's."""


def list_byte_characters() -> list[str]:
    """Return the printable character of each byte in a byte-level vocabulary.

    Printable bytes of Latin-1 map to themselves, the others to characters from 256 up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def build_byte_tokenizer(folder: str | Path) -> None:
    """Write a tokenizer of the 256 bytes, followed by `SPECIAL_TOKENS` and `WORD_TOKENS`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(list_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The order decides the ids: 256, 257, ...
    for token in SPECIAL_TOKENS:
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    for token in WORD_TOKENS:
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings)
    end, text_end = tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)
    ids = {"bos_token_id": text_end, "eos_token_id": [end, text_end], "pad_token_id": text_end}
    write_json(folder / "generation_config.json", ids)


def list_tokenizer_files(folder: str | Path) -> list[str]:
    """Return the names of the folder's files that belong to the tokenizer.

    Templates in `CHAT_TEMPLATES` belong to it too. Raises ValueError for a link that leaves the
    folder.
    """
    folder = Path(folder)
    if folder.is_dir():
        check_links(folder)
    names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for file in sorted((folder / CHAT_TEMPLATES).glob("*.jinja")):
        if file.is_file():
            names.append(f"{CHAT_TEMPLATES}/{file.name}")
    return names


def check_tokenizer_files(folder: str | Path) -> None:
    """Raise ValueError naming the first missing file."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"tokenizer folder {folder} does not exist")
    names = list_tokenizer_files(folder)
    for name in names:
        check_not_pointer(folder / name)
    needed = ["tokenizer_config.json"]
    # Slow tokenizers consist of two files instead of one, or of sentencepiece's.
    if "tokenizer.json" not in names and "vocab.json" in names:
        needed.append("merges.txt")
    elif SENTENCEPIECE not in names:
        needed.append("tokenizer.json")
    for name in needed:
        if name in names:
            continue
        hint = ""
        if name == needed[-1]:
            for pattern in ("tekken.json", "*.tiktoken", "tokenizer.model.*"):
                for other in folder.glob(pattern):
                    hint = hint or f": {other.name} is in a format that is not read"
        raise ValueError(f"tokenizer file {folder / name} is missing{hint}")


def load_tokenizer(folder: str | Path) -> Any:
    """Load the folder's transformers tokenizer without contacting a model hub.

    Raises ValueError if the folder is not complete.
    """
    folder = Path(folder)
    check_tokenizer_files(folder)
    for name in _SETTINGS:
        if (folder / name).exists():
            # Checked here, because transformers reads it with the limits of the interpreter.
            read_json_object(folder / name)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind: Any = AutoTokenizer
    original = None
    if (folder / "tokenizer.json").exists():  # Slow tokenizers have no such file.
        read_tokenizer_json(folder / "tokenizer.json")
        # Classes of one model (GPT2Tokenizer, which SmolLM2's folders name, LlamaTokenizer) split
        # texts by rules of their own instead of those in tokenizer.json, so the model would see
        # other tokens than in its training.
        kind = PreTrainedTokenizerFast
    elif not (folder / "vocab.json").exists():
        original = _open_sentencepiece(folder / SENTENCEPIECE)

    try:
        tokenizer = kind.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except KeyError as error:  # transformers needs more entries than the tokenizers library does
        raise ValueError(f"tokenizer folder {folder}: its files lack {error}") from error
    if original is not None:
        _check_conversion(folder / SENTENCEPIECE, tokenizer, original)
    return tokenizer


def _open_sentencepiece(file: Path) -> Any:
    """Load a file of sentencepiece with its own library; raise ValueError if it is malformed."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise ValueError(
            f"tokenizer file {file}: to read it, install sentencepiece, or add tokenizer.json"
        ) from error
    try:
        return SentencePieceProcessor(model_file=str(file))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"tokenizer file {file} is malformed: {error}") from error


def _check_conversion(file: Path, tokenizer: Any, original: Any) -> None:
    """Raise ValueError if transformers splits texts otherwise than sentencepiece.

    The model was trained with sentencepiece's tokens.
    """
    for text in _PROBES:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        expected = original.encode(text)
        if tokens != expected:
            raise ValueError(
                f"tokenizer file {file}: transformers splits {text!r} into {tokens[:8]}, "
                f"sentencepiece into {expected[:8]}: name the model's tokenizer_class in "
                "tokenizer_config.json, or add tokenizer.json"
            )


def read_tokenizer_json(file: Path) -> Any:
    """Load tokenizer.json with the `tokenizers` library; raise ValueError if it is malformed."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(
            f"tokenizer folder {file.parent}: {file.name} is malformed: {error}"
        ) from error


def open_tokenizer(folder: Path, *, vocab_size: int | None = None) -> tuple[Any, tuple[int, ...]]:
    """Return the transformers tokenizer and the tokens that end a reply.

    Those are the tokenizer's end of turn and the ones of generation_config.json and config.json.
    Raises ValueError if a file is missing or malformed, or a token id is beyond the model's
    vocabulary. Special tokens beyond it that only a text naming them can bring in are let through
    (Gemma 3's `<image_soft_token>`); trainer and generator refuse their ids.
    """
    try:
        tokenizer = load_tokenizer(folder)
        tokenizer.encode("?", add_special_tokens=False)  # some values are read only now
        if tokenizer.eos_token_id is None:
            raise ValueError("no eos_token is named: a reply would have no end")

        ends = {tokenizer.eos_token_id, *_end_ids(folder / "generation_config.json")}
        stop_ids = tuple(sorted(ends))
        if not all(type(token_id) is int and token_id >= 0 for token_id in stop_ids):
            raise ValueError(
                f"eos_token_id of generation_config.json is not a list of token ids: {stop_ids}"
            )
        # config.json may have the defaults of its class, which are ordinary tokens of this
        # vocabulary.
        added = tokenizer.added_tokens_decoder.keys()
        stop_ids = tuple(sorted({*stop_ids, *(added & set(_end_ids(folder / "config.json")))}))
    # transformers raises all of these for malformed files.
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"the tokenizer of {folder} cannot be used: {error}") from error
    token, token_id = _find_last_token(tokenizer, stop_ids=stop_ids)
    if vocab_size is not None and max(token_id, *stop_ids) >= vocab_size:
        raise ValueError(
            f"the tokenizer of {folder} has token {token!r} with id {token_id} and ends replies "
            f"with {list(stop_ids)}: the model has vocab_size={vocab_size}, so ids must be from 0 "
            f"to {vocab_size - 1}: give the tokenizer that the weights were trained with"
        )
    return tokenizer, stop_ids


def _find_last_token(tokenizer: Any, *, stop_ids: Collection[int]) -> tuple[str, int]:
    """Return the token with the largest id that a text may hold, and its id."""
    used = {*stop_ids, tokenizer.bos_token_id, tokenizer.unk_token_id}
    # Special tokens that no template writes come from a text that names them alone.
    unused: set[int] = set()
    for token_id, added in tokenizer.added_tokens_decoder.items():
        is_in_template = added.content in str(tokenizer.chat_template)
        if added.special and token_id not in used and not is_in_template:
            unused.add(token_id)

    last_token, last_id = "", -1
    for token, token_id in tokenizer.get_vocab().items():
        if token_id > last_id and token_id not in unused:
            last_token, last_id = token, token_id
    return last_token, last_id


def _end_ids(file: Path) -> list[Any]:
    """Return `eos_token_id` of a settings file as a list, empty if there is none."""
    if not file.exists():
        return []
    content = read_json_object(file)
    # Models of texts and images have the settings of their language model one level deeper.
    inner = content.get("text_config")
    default = inner.get("eos_token_id") if isinstance(inner, dict) else None
    ids = content.get("eos_token_id", default)
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def find_tokens_before_text(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that the tokenizer puts before a text, such as `<s>`; most put none."""
    inner = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    # Searched rather than cut off: a tokenizer may also put tokens after a text.
    for place in range(len(whole) - len(inner) + 1):
        if whole[place : place + len(inner)] == inner:
            return tuple(whole[:place])
    return ()


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


TOKEN_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", SENTENCEPIECE)
"""Files that assign tokens to the rows of the model's weights.

The last counts only where there is no tokenizer.json.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFingerprint:
    """Checksums of a tokenizer's files, as recorded in checkpoints."""

    folder: str
    parts: Mapping[str, str]
    """Hexadecimal sha256 by file name."""
    complete: bool = True
    """False in checkpoints of older versions, which have no other files than `_FIRST_FILES`."""

    def find_differences(self, other: TokenizerFingerprint, *, tokens_alone: bool) -> list[str]:
        """Return the names of the files that differ; with `tokens_alone` those of `TOKEN_FILES`."""
        # Templates have any names, so those of both tokenizers are compared.
        templates = sorted({*self.parts, *other.parts} - {*TOKENIZER_FILES})
        names: Sequence[str] = TOKEN_FILES if tokens_alone else (*TOKENIZER_FILES, *templates)
        if tokens_alone and "tokenizer.json" in self.parts and "tokenizer.json" in other.parts:
            names = TOKEN_FILES[:-1]
        # A file that one of them did not record cannot be told from a missing file.
        if not (self.complete and other.complete):
            names = [name for name in names if name in _FIRST_FILES]
        return [name for name in names if self.parts.get(name) != other.parts.get(name)]


def compute_fingerprint(
    folder: str | Path, *, known_as: str | Path | None = None
) -> TokenizerFingerprint:
    """Return the fingerprint of the tokenizer in a folder, recorded under the name `known_as`."""
    parts: dict[str, str] = {}
    for name in list_tokenizer_files(folder):
        parts[name] = hashlib.sha256((Path(folder) / name).read_bytes()).hexdigest()
    return TokenizerFingerprint(folder=str(Path(known_as or folder).resolve()), parts=parts)
