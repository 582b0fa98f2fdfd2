"""What a tokenizer is, as checkpoints note it: a checksum of each of its parts. Needs no PyTorch.

The checksums are of the files' contents as they are used, so that a folder and a copy of it have the same:
of JSON its values, without names of folders and versions; of generation settings the tokens that end a reply.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKEN_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json")
"""Parts that say to which token a row of the model's weights belongs."""
SETTINGS = "tokenizer_config.json"
CHAT_TEMPLATE, TEMPLATE_FILE = "chat template", "chat_template.jinja"
END_TOKENS, END_FILE = "eos_token_id of generation_config.json", "generation_config.json"

_NO_SETTINGS = (
    "chat_template", "name_or_path", "tokenizer_file", "transformers_version", "_commit_hash", "is_local",
    "local_files_only",
)  # fmt: skip
"""What a tokenizer's settings hold that is a part of its own, or nothing that it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerPrint:
    """A tokenizer, to be recognised."""

    folder: str
    parts: Mapping[str, str]
    """sha256, in hex, by name: a file, or what of it is used."""

    def differences(self, other: TokenizerPrint, *, tokens_alone: bool) -> list[str]:
        """Parts that the two do not have in common, by name; `tokens_alone`: of `TOKEN_FILES`."""
        names = sorted({*self.parts, *other.parts})
        return [
            name
            for name in names
            if self.parts.get(name) != other.parts.get(name) and (name in TOKEN_FILES or not tokens_alone)
        ]


def tokenizer_print(folder: str | Path, *, known_as: str | Path | None = None) -> TokenizerPrint:
    """Of the tokenizer in a folder, which the answer calls `known_as`; None: by its own path.

    Raises:
        ValueError: names the file that is malformed.
    """
    path = Path(folder)
    parts = {name: hashlib.sha256(content.encode()).hexdigest() for name, content in _parts(path)}
    return TokenizerPrint(folder=str(Path(known_as or path).resolve()), parts=parts)


def read_tokenizer_print(value: Any) -> TokenizerPrint | None:
    """Of JSON, as `dataclasses.asdict` made it; None where none was noted."""
    if value is None:
        return None
    parts = {str(name): str(digest) for name, digest in value["parts"].items()}
    return TokenizerPrint(folder=str(value["folder"]), parts=parts)


def _parts(folder: Path) -> Iterator[tuple[str, str]]:
    """The text that stands for each part."""
    whole = (folder / "tokenizer.json").exists()
    if whole:
        yield "tokenizer.json", _canonical(_same_merges(_read_json(folder / "tokenizer.json")))
    for name in () if whole else ("vocab.json", "merges.txt"):  # which are not read beside it
        if (folder / name).exists():
            yield name, (folder / name).read_text(encoding="utf-8")
    settings = _read_json(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    yield SETTINGS, _canonical({name: v for name, v in settings.items() if name not in _NO_SETTINGS})
    for name in ("added_tokens.json", "special_tokens_map.json"):
        if (folder / name).exists():
            yield name, _canonical(_read_json(folder / name))
    if (folder / TEMPLATE_FILE).exists():
        yield CHAT_TEMPLATE, (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    elif (template := settings.get("chat_template")) is not None:
        yield CHAT_TEMPLATE, template if isinstance(template, str) else _canonical(template)
    if (folder / END_FILE).exists():
        ids = _read_json(folder / END_FILE).get("eos_token_id") or []
        yield END_TOKENS, _canonical(sorted(ids) if isinstance(ids, list) else [ids])


def _same_merges(content: dict[str, Any]) -> dict[str, Any]:
    """What versions of the library write differently in the same form: merges as texts or as pairs, and how a
    text was last cut and padded, which is asked for anew with each text."""
    content = {name: value for name, value in content.items() if name not in ("truncation", "padding")}
    model = content.get("model")
    if isinstance(model, dict) and isinstance(model.get("merges"), list):
        merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        content["model"] = model | {"merges": merges}
    return content


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"tokenizer file {file} is malformed: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"tokenizer file {file} is malformed: it is no JSON object")
    return content
