"""Initial weights and tokenizer of a run.

They are a user's folder, a random model, or a tiny model after a supervised warm-up. The warmed-up
model is made once and cached under a key of everything that it depends on: the model, the seed, the
demonstrations, the warm-up and the trainer's arithmetic.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from rl.config.configurable import Configurable
from rl.config.json import to_dict
from rl.models.files.hf import HFFolder, write_random_model
from rl.models.files.tokenizer import (
    TokenizerFingerprint,
    build_byte_tokenizer,
    compute_fingerprint,
    open_tokenizer,
)
from rl.models.spec import ModelSpec
from rl.types import TrainingSample

RECIPE = 3
"""Part of the key; incremented when a change of the warm-up, the tokenizer or the initialization
changes the result."""
NUM_KEYED_DEMONSTRATIONS = 256
"""Number of demonstrations in the key; the others follow from the same settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingPoint:
    """The model folder that trainer and generator start from."""

    folder: Path
    """Hugging Face folder with config, tokenizer and weights."""
    spec: ModelSpec
    warmed_up: Path | None = None
    """Folder that the warm-up will write; None without a pending warm-up."""
    seed: int | None = None
    """Seed of the random model that `make` writes; None for an existing folder."""

    def make(self) -> None:
        """Write the random model unless it exists."""
        if self.seed is not None:
            write_random_model(self.folder, spec=self.spec, seed=self.seed)

    def tokenizer(self) -> tuple[Any, tuple[int, ...]]:
        """Return the tokenizer and the tokens that end a reply, without writing the folder."""
        vocab_size: int = self.spec.model.vocab_size
        with self._open_tokenizer_folder() as folder:
            return open_tokenizer(folder, vocab_size=vocab_size)

    def compute_fingerprint(self) -> TokenizerFingerprint:
        with self._open_tokenizer_folder() as folder:
            return compute_fingerprint(folder, known_as=self.folder)

    @contextmanager
    def _open_tokenizer_folder(self) -> Iterator[Path]:
        """Yield the folder, or a temporary one with the tokenizer that it will have."""
        if self.seed is None or self.folder.exists():
            yield self.folder
            return
        # A check of the config writes nothing that stays.
        with tempfile.TemporaryDirectory() as folder:
            build_byte_tokenizer(folder)
            yield Path(folder)


def open_model_folder(
    path: Path, *, spec: ModelSpec | None, batch_invariant: bool = False
) -> StartingPoint:
    """Open a user's Hugging Face folder.

    Args:
        spec: expected model (`HFFolder.spec`); None takes family and sizes from the folder.
        batch_invariant: value for a spec that is taken from the folder.

    Raises:
        ValueError: names a missing file or tensor, an unsupported field, all fields that differ
            from the expected model's, or the first tensor with another shape.
    """
    folder = HFFolder(path, tokenizer=True)
    take = (
        "set any_model_size=True to take the model from the folder, or choose a folder of that "
        "model"
    )
    spec = (
        replace(folder.spec(), batch_invariant=batch_invariant)
        if spec is None
        else folder.spec(expected=spec, otherwise=take)
    )
    # Names and shapes are compared without the memory of a model.
    with torch.device("meta"):
        model = spec.model.build()
    folder.check(model, spec.adapter(spec.model))
    return StartingPoint(folder=folder.path, spec=spec)


def describe_random_model(cache: Path, *, spec: ModelSpec, seed: int) -> StartingPoint:
    """Return a model to be drawn from the seed; nothing is written yet."""
    key = _make_key({"recipe": RECIPE, "model": to_dict(spec.model), "seed": seed})
    return StartingPoint(
        folder=cache / f"{spec.name}-{spec.flavor}-random-{key}", spec=spec, seed=seed
    )


def find_warm_model(
    cache: Path,
    *,
    spec: ModelSpec,
    seed: int,
    warmup: Configurable.Config,
    demonstrations: Iterable[TrainingSample],
    arithmetic: dict[str, Any],
) -> StartingPoint:
    """Return the cached model after its warm-up, or the random model that it starts from.

    Args:
        demonstrations: training samples of the warm-up, in order.
        arithmetic: other settings of the trainer that shape the steps: optimizer and dtypes.
    """
    # Everything that changes a bit of the result: another key is another folder.
    parts = {
        "recipe": RECIPE,
        "model": to_dict(spec.model),
        "seed": seed,
        "warmup": to_dict(warmup),
        "demonstrations": [
            _hash_sample(sample) for sample in islice(demonstrations, NUM_KEYED_DEMONSTRATIONS)
        ],
        "arithmetic": arithmetic,
    }
    warm = cache / f"{spec.name}-{spec.flavor}-warm-{_make_key(parts)}"
    # It appears by one rename, so that an interrupted warm-up leaves nothing here.
    if warm.exists():
        return open_model_folder(warm, spec=spec)
    return replace(describe_random_model(cache, spec=spec, seed=seed), warmed_up=warm)


def _hash_sample(sample: TrainingSample) -> str:
    return hashlib.sha256(sample.token_ids.tobytes() + sample.mask.tobytes()).hexdigest()


def _make_key(parts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
