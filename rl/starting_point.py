"""Where a run's weights and tokenizer come from: a given folder, or a warmed-up tiny model.

The warmed-up model is made once and kept, under a key of all that it depends on: the model,
the seed, the demonstrations, the warm-up and the trainer's arithmetic.
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
from rl.config.serialize import to_dict
from rl.models.hf import HFFolder
from rl.models.spec import ModelSpec
from rl.models.starting_point import write_random_model
from rl.models.tokenizer import build_byte_tokenizer
from rl.models.tokenizer_print import TokenizerPrint, tokenizer_print
from rl.rollouts.tokenizer import open_tokenizer
from rl.types import TrainingSample

RECIPE = 3
"""Part of the key; raised when the code of the warm-up, the tokenizer or the initialisation changes
what comes out."""
NUM_KEYED_DEMONSTRATIONS = 256
"""The first of the warm-up, which stand for all: the rest follows from the same settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingPoint:
    """The folder that trainer and generator start from."""

    folder: Path
    """Hugging Face folder with config, tokenizer and weights."""
    spec: ModelSpec
    """The model as the folder has it."""
    warmed_up: Path | None = None
    """Where the warm-up will leave its result; None when there is none to do."""
    seed: int | None = None
    """Of the random model that `make` writes into `folder`; None for a folder that is there."""

    @property
    def origin(self) -> str:
        """The folder of the weights that training starts from, as checkpoints note it."""
        return str((self.warmed_up or self.folder).resolve())

    def make(self) -> None:
        """Write the random model, unless it is there."""
        if self.seed is not None:
            write_random_model(self.folder, spec=self.spec, seed=self.seed)

    def tokenizer(self) -> tuple[Any, tuple[int, ...]]:
        """The tokenizer and the tokens that end a reply; writes nothing, also before `make`."""
        vocab_size: int = self.spec.model.vocab_size  # type: ignore[attr-defined]
        with self._tokenizer_folder() as folder:
            return open_tokenizer(folder, vocab_size=vocab_size)

    def tokenizer_print(self) -> TokenizerPrint:
        """Of that tokenizer, as checkpoints note it."""
        with self._tokenizer_folder() as folder:
            return tokenizer_print(folder, known_as=self.folder)

    @contextmanager
    def _tokenizer_folder(self) -> Iterator[Path]:
        """Its own, or one with the tokenizer that it will have."""
        if self.seed is None or self.folder.exists():
            yield self.folder
            return
        with tempfile.TemporaryDirectory() as folder:
            build_byte_tokenizer(folder)
            yield Path(folder)


def given_folder(path: str | Path, *, spec: ModelSpec, any_size: bool) -> StartingPoint:
    """A user's Hugging Face folder.

    Args:
        any_size: take the model's sizes from the folder instead of asking for those of `spec`.

    Raises:
        ValueError: names the missing file or tensor, or the first tensor of another shape.
    """
    folder = HFFolder(Path(path).expanduser(), tokenizer=True)
    if any_size:
        spec = replace(spec, flavor=folder.path.name, model=spec.from_hf_config(folder.config))
    with torch.device("meta"):
        model = spec.model.build()
    folder.check(model, spec.adapter(spec.model))
    return StartingPoint(folder=folder.path, spec=spec)


def random_model(cache: Path, *, spec: ModelSpec, seed: int) -> StartingPoint:
    """A model drawn from the seed; nothing is written yet."""
    key = _key({"recipe": RECIPE, "model": to_dict(spec.model), "seed": seed})
    return StartingPoint(folder=cache / f"{spec.name}-{spec.flavor}-random-{key}", spec=spec, seed=seed)


def warmed_up_model(
    cache: Path,
    *,
    spec: ModelSpec,
    seed: int,
    warmup: Configurable.Config,
    demonstrations: Iterable[TrainingSample],
    arithmetic: dict[str, Any],
) -> StartingPoint:
    """The model after its warm-up if that was made before, else what the warm-up starts from.

    Args:
        demonstrations: of the warm-up, in order, as it trains on them: so what the renderer and the
            environments put between the replies is part of the key.
        arithmetic: what else of the trainer shapes the steps: optimizer and dtypes.
    """
    made_of = {
        "recipe": RECIPE,
        "model": to_dict(spec.model),
        "seed": seed,
        "warmup": to_dict(warmup),
        "demonstrations": [_digest(sample) for sample in islice(demonstrations, NUM_KEYED_DEMONSTRATIONS)],
        "arithmetic": arithmetic,
    }
    warm = cache / f"{spec.name}-{spec.flavor}-warm-{_key(made_of)}"
    if warm.exists():
        return given_folder(warm, spec=spec, any_size=False)
    return replace(random_model(cache, spec=spec, seed=seed), warmed_up=warm)


def _digest(sample: TrainingSample) -> str:
    """Of its tokens, and of which are trained on."""
    return hashlib.sha256(sample.token_ids.tobytes() + sample.mask.tobytes()).hexdigest()


def _key(made_of: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]
