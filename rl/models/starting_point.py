"""A model made from a seed, with a tokenizer of bytes, as a Hugging Face folder."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from rl.models.hf import HFFolder, write_hf_folder
from rl.models.spec import ModelSpec
from rl.models.tokenizer import build_byte_tokenizer


def write_random_model(folder: str | Path, *, spec: ModelSpec, seed: int) -> Path:
    """Make `folder` unless it is there; the same bytes for a seed on every machine.

    Two processes may call this at once: each writes its own copy and the first to finish
    gives the folder its name.

    Raises:
        ValueError: a folder is there that holds something else than a whole model of `spec`.
    """
    folder = Path(folder)
    if not folder.exists():
        _write(folder, spec=spec, seed=seed)
    with torch.device("meta"):
        model = spec.model.build()
    HFFolder(folder, tokenizer=True).check(model, spec.adapter(spec.model))
    return folder


def _write(folder: Path, *, spec: ModelSpec, seed: int) -> None:
    model = spec.model.build()
    model.init_weights(seed=seed)
    with tempfile.TemporaryDirectory() as tokenizer:
        build_byte_tokenizer(tokenizer)
        try:
            write_hf_folder(
                folder,
                model.named_parameters(),
                spec.adapter(spec.model),
                dtype=torch.float32,
                tokenizer_from=tokenizer,
            )
        except FileExistsError:
            return
