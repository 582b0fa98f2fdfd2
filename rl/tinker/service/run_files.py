"""The JSON files beside weights: run.json of a training run, checkpoint.json of each checkpoint."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl.tinker.messages import LoRASettings, ModelSettings
from rl.tinker.service.responses import Metadata

log = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    model_id: str
    session_id: str
    owner_hash: str
    settings: ModelSettings
    created_s: float
    """Wall time."""
    user_metadata: Metadata | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    settings: ModelSettings
    created_s: float
    expires_s: float | None
    size_bytes: int
    user_metadata: Metadata | None


def write_json(path: Path, record: RunRecord | CheckpointRecord) -> None:
    """The file is there whole, or as it was before."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w") as file:
        json.dump({"format": FORMAT, **asdict(record)}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_run(path: Path) -> RunRecord | None:
    """None where there is no file; one that cannot be read is said in the log."""
    if (values := _read(path)) is None:
        return None
    try:
        return RunRecord(**values)
    except TypeError as error:
        log.warning("%s is left out: %s", path, error)
        return None


def read_checkpoint(path: Path) -> CheckpointRecord | None:
    """As `read_run`."""
    if (values := _read(path)) is None:
        return None
    try:
        return CheckpointRecord(**values)
    except TypeError as error:
        log.warning("%s is left out: %s", path, error)
        return None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_bytes())
        if values.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        values["settings"] = _settings(values["settings"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is left out: %s", path, error)
        return None
    return values


def _settings(values: Mapping[str, Any]) -> ModelSettings:
    lora = values["lora"]
    return ModelSettings(base_model=values["base_model"], lora=None if lora is None else LoRASettings(**lora))
