"""Byte tokenizers with the published chat templates that TRL contains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import trl

from rl.models.files.tokenizer import build_byte_tokenizer, list_byte_characters, load_tokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<\uff5cend▁of▁sentence\uff5c>",
    "gemma": "<end_of_turn>",
    "glm4moe": "<|user|>",
    "gptoss": "<|return|>",
    "idefics3": "<end_of_utterance>",
    "llama3": "<|eot_id|>",
    "llava": "</s>",
    "phi3": "<|end|>",
    "smolvlm": "<end_of_utterance>",
}
"""End-of-turn tokens by the beginning of a file's name; all other templates use <|im_end|>."""

NUM_MERGES = 40
TEXT = (
    "user\nassistant\nsystem\n\nWhat is 12 + 34? And then, twice? Think first.\n\n"
    "tool_response and then the answer: it is 46.\n"
)
"""Training text for the merges, including line ends."""

_SPECIAL = re.compile(r"<[|\uff5c][^<>\n{}' ]+>|<turn\|>|\[/?INST\]")


def byte_tokenizer(folder: Path, name: str) -> Any:
    """Return a tokenizer of bytes with a published template and its special tokens."""
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    end = next((token for prefix, token in ENDS.items() if name.startswith(prefix)), "<|im_end|>")
    build_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "bos_token": "<bos>",
        "eos_token": end,
        "extra_special_tokens": sorted({*_SPECIAL.findall(template), "<start_of_turn>"}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


def merging_tokenizer(folder: Path, name: str) -> Any:
    """Return a byte tokenizer with merges, so that several token sequences decode to the same
    text.
    """
    from tokenizers import Tokenizer, models, trainers

    byte_tokenizer(folder, name)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = backend.get_added_tokens_decoder()
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer, learner.decoder = backend.pre_tokenizer, backend.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=256 + NUM_MERGES, initial_alphabet=list_byte_characters(), show_progress=False
    )
    learner.train_from_iterator([TEXT] * 2, trainer)
    for token_id in sorted(special):
        add = learner.add_special_tokens if special[token_id].special else learner.add_tokens
        add([special[token_id]])
    learner.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)
