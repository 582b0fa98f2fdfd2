"""What a run's folder holds to be served: its weights, and how they read conversations.

No code of the run is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.json import get_value_at, load_values, to_dict
from rl.config.tree import ConfigError
from rl.observability.run_folder import CONFIG, read_status, refuse_special_files
from rl.rollouts.renderer import RendererConfig
from rl.training.checkpoints.config import RUN_FOLDER
from rl.training.checkpoints.files import HF_FOLDER, list_steps
from rl.training.config import Dtype
from rl.utils.files import parse_json, read_regular


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """How a run's model was trained to be asked."""

    name: str
    """Name of the run's folder."""
    checkpoints: Path
    renderer: RendererConfig
    max_model_len: int
    """Most tokens of a conversation with its reply."""
    dtype: Dtype
    """Dtype of the generator."""
    announces_tools: bool
    """True if the model is told which tools a client offers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWeights:
    """Weights of a run, as a Hugging Face folder or in a checkpoint."""

    folder: Path
    step: int | None
    """Step of the checkpoint; None for the Hugging Face folder of the end of the run."""
    note: str = ""
    """A line for the user, if these are not the weights of a finished run."""


def read_settings(run: Path) -> RunSettings:
    """Read a run's config; raise ValueError if the folder is not a run's."""
    if not run.is_dir():
        raise ValueError(f"{run}: there is no such folder; give the folder of a run")
    refuse_special_files(run)
    try:
        values = parse_json(read_regular(run / CONFIG))["values"]
    except (OSError, ValueError, KeyError, TypeError):
        values = None
    if not isinstance(values, Mapping):
        raise ValueError(f"{run} is not the folder of a run: it has no readable {CONFIG}")

    checkpoints = Path(str(get_value_at(values, "trainer.checkpoint.folder", RUN_FOLDER)))
    dtype = get_value_at(values, "generator.dtype", "float32")
    return RunSettings(
        name=run.resolve().name,
        checkpoints=run / checkpoints.expanduser(),
        renderer=_read_renderer(run, values),
        max_model_len=_read_length(run, values),
        # On a CPU products in float16 are slower, and it has less room than bfloat16.
        dtype="float32" if dtype == "float32" else "bfloat16",
        announces_tools=bool(get_value_at(values, "agents.announces_tools", True)),
    )


def _read_renderer(run: Path, values: Mapping[str, Any]) -> RendererConfig:
    given, default = get_value_at(values, "renderer", {}), RendererConfig()
    try:
        # An older run has fewer fields than there are now.
        config = load_values(default, to_dict(default) | given)
    except (ConfigError, TypeError, ValueError) as error:
        raise ValueError(f"{run / CONFIG}: renderer: {error}") from error
    # Clients send the whole conversation each time, so that no reply is looked at in hindsight.
    config.keep_replies = config.kind == "template"
    return config


def _read_length(run: Path, values: Mapping[str, Any]) -> int:
    length = get_value_at(values, "generator.max_model_len", 4096)
    if not isinstance(length, int) or length < 2:
        raise ValueError(f"{run / CONFIG}: generator.max_model_len={length!r:.80}: must be above 1")
    return length


def find_weights(run: Path, settings: RunSettings, *, step: int | None = None) -> RunWeights:
    """Return the last weights of a run, or those of a step.

    Raises ValueError if there are none.
    """
    steps = list_steps(settings.checkpoints)
    if step is not None:
        if step in steps:
            return RunWeights(folder=steps[step], step=step)
        there = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"--step {step}: {run} has no such checkpoint; its checkpoints: {there}")

    exported = settings.checkpoints / HF_FOLDER
    has_export = exported.is_dir() and any(exported.glob("*.safetensors"))
    is_finished = read_status(run) == "finished"
    if has_export and is_finished:
        return RunWeights(folder=exported, step=None)
    # The export of a run that goes on after its end is that of the earlier end.
    if steps:
        last, folder = max(steps.items())
        why = "has no Hugging Face folder" if is_finished else "goes on, or did not finish"
        return RunWeights(
            folder=folder, step=last, note=f"{run} {why}: serving its last checkpoint, step {last}"
        )
    if has_export:
        return RunWeights(folder=exported, step=None)
    raise ValueError(
        f"{run} has no checkpoint in {settings.checkpoints}: a run saves one every "
        "trainer.checkpoint.interval steps and at its end"
    )
