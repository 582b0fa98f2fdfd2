"""Where a run's weights and tokenizer come from: a given folder, or a warmed-up tiny model.

The warmed-up model is made once and kept, under a key of all that it depends on: the model,
the task, the warm-up and the seed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rl.config.configurable import Configurable
from rl.config.serialize import to_dict
from rl.models.hf import HFFolder
from rl.models.spec import ModelSpec
from rl.models.starting_point import write_random_model

RECIPE = 1
"""Part of the key; raised when the code of the warm-up, the tokenizer or the initialisation changes
what comes out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingPoint:
    """The folder that trainer and generator start from."""

    folder: Path
    """Hugging Face folder with config, tokenizer and weights."""
    warmed_up: Path | None
    """Where the warm-up will leave its result; None when there is none to do."""
    spec: ModelSpec
    """The model as the folder has it."""


def given_folder(path: str, *, spec: ModelSpec, any_size: bool) -> StartingPoint:
    """A user's Hugging Face folder.

    Args:
        any_size: take the model's sizes from the folder instead of asking for those of `spec`.

    Raises:
        ValueError: names the missing file or tensor, or the first tensor of another shape.
    """
    folder = HFFolder(path, tokenizer=True)
    if any_size:
        spec = replace(spec, flavor=folder.path.name, model=spec.from_hf_config(folder.config))
    with torch.device("meta"):
        model = spec.model.build()
    folder.check(model, spec.adapter(spec.model))
    return StartingPoint(folder=folder.path, warmed_up=None, spec=spec)


def made_here(
    cache: Path,
    *,
    spec: ModelSpec,
    task: Configurable.Config,
    warmup: Configurable.Config | None,
    seed: int,
) -> StartingPoint:
    """A seeded random model, or its warmed-up form if that was made before."""
    made_of: dict[str, Any] = {"recipe": RECIPE, "model": to_dict(spec.model), "seed": seed}
    random = cache / f"{spec.name}-{spec.flavor}-random-{_key(made_of)}"
    if warmup is None:
        return StartingPoint(folder=_random(random, spec, seed), warmed_up=None, spec=spec)
    made_of |= {"task": to_dict(task), "warmup": to_dict(warmup)}
    warm = cache / f"{spec.name}-{spec.flavor}-warm-{_key(made_of)}"
    if warm.exists():
        return given_folder(str(warm), spec=spec, any_size=False)
    return StartingPoint(folder=_random(random, spec, seed), warmed_up=warm, spec=spec)


def _random(folder: Path, spec: ModelSpec, seed: int) -> Path:
    return write_random_model(folder, spec=spec, seed=seed)


def _key(made_of: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]
