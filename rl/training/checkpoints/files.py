"""The folder of a checkpoint on disk, and the detection of damage. Needs no PyTorch.

    checkpoints/
        step-10/
            __0_0.distcp  __1_0.distcp  .metadata    tensors, by torch.distributed.checkpoint
            random.1x2x1x1.0.safetensors  ...        random states of each rank of a layout
            state.json                               `SavedState`
            manifest.json                            size and checksum of every other file
        hf/                                          a Hugging Face folder

A folder gets its name when all of its files are on disk, so a named folder was complete once.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from rl.models.files.tokenizer import TokenizerFingerprint
from rl.types import LoopPosition, ProblemsFingerprint
from rl.utils.errors import RunError
from rl.utils.files import parse_json, remove

logger = logging.getLogger(__name__)

FORMAT = 4
"""Version of what a checkpoint holds."""
_READABLE = (3, FORMAT)
"""Versions that are read; version 3 has its random states in pickles, which are not."""
MANIFEST, STATE = "manifest.json", "state.json"
TENSORS_SUFFIX, METADATA = ".distcp", ".metadata"
RANDOM, RANDOM_SUFFIX = "random", ".safetensors"
"""Name of the random states, and how their files end."""
HF_CONFIG = "config.json"
HF_FOLDER, ADAPTER_FOLDER = "hf", "adapter"
"""Names beside the steps of a run's last weights, in the formats of Hugging Face and PEFT."""
DAMAGED = ".damaged"
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_CHUNK_BYTES = 1 << 20

T = TypeVar("T")


class DamagedCheckpointError(RunError, ValueError):
    """A file of a checkpoint is missing or differs from what was written."""


Skip = Callable[[Path, DamagedCheckpointError], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """Everything in a checkpoint besides tensors and random states."""

    policy_version: int
    model_only: bool
    """True for a checkpoint without optimizer and random states, which cannot be continued."""
    position: LoopPosition | None
    """Position of the loop that saved, or None if no loop did."""
    converters: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Converter settings that change the meaning of the weights (`ModelConverters.saved_settings`).
    """
    base_model: str | None = None
    """Hugging Face folder of the frozen base weights, if there is one (`Policy.base_model`)."""
    tokenizer: TokenizerFingerprint | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSum:
    """Size and checksum of a file."""

    num_bytes: int
    crc32: int


def step_folder(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"step-{step}"


def list_steps(folder: str | Path) -> dict[int, Path]:
    """Return the checkpoints in a folder by step, in ascending order."""
    folder = Path(folder)
    if not folder.is_dir():
        return {}
    steps: dict[int, Path] = {}
    for path in folder.iterdir():
        match = _STEP.fullmatch(path.name)
        if match is not None and path.is_dir():
            steps[int(match[1])] = path
    return dict(sorted(steps.items()))


def is_checkpoint(folder: str | Path) -> bool:
    """Return whether the folder is a checkpoint of this project.

    A folder with a config.json is one of Hugging Face, whatever else somebody has put into it.
    """
    folder = Path(folder)
    return not (folder / HF_CONFIG).exists() and any(
        (folder / name).is_file() for name in (MANIFEST, STATE)
    )


def write_description(folder: Path, state: SavedState, sums: Mapping[str, FileSum]) -> None:
    """Write state and manifest; `sums` describes the files that are already in the folder."""
    # The state first, because the manifest has its checksum too.
    _write_json(folder / STATE, dataclasses.asdict(state))
    sums = {**sums, STATE: sum_of_file(folder / STATE)}
    manifest = {name: dataclasses.asdict(sums[name]) for name in sorted(sums)}
    _write_json(folder / MANIFEST, {"files": manifest})


def read_state(folder: str | Path) -> SavedState:
    """Read the state that `write_description` wrote.

    Raises ValueError if it is damaged or of another version.
    """
    file = Path(folder) / STATE
    values = _read_json(file)
    try:
        if values["position"] is not None:
            values["position"] = _parse_position(values["position"])
        if values["tokenizer"] is not None:
            # A fingerprint of an earlier version does not say whether it is complete.
            fields = {"complete": False} | values["tokenizer"]
            values["tokenizer"] = TokenizerFingerprint(**fields)
        return SavedState(**values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"checkpoint file {file} is corrupted: {error!r}") from error


def _parse_position(values: Mapping[str, Any]) -> LoopPosition:
    problems = values.get("problems")  # a checkpoint of an earlier version has none
    if problems is not None:
        problems = ProblemsFingerprint(**problems | {"digests": tuple(problems["digests"])})
    return LoopPosition(
        **{**values, "outstanding": tuple(values["outstanding"]), "problems": problems}
    )


def check_files(folder: str | Path, *, tensors: bool, share: slice = slice(None)) -> None:
    """Check the sizes of all files, then read files and compare their checksums.

    Args:
        tensors: False reads only the small files, which hold no tensors.
        share: part of the files to read, in the order of their names.

    Raises:
        DamagedCheckpointError: a file is missing, not listed, or differs from what was written.
        ValueError: a file cannot be read.
    """
    path = Path(folder)
    sums = _read_manifest(path)
    # Sizes cost nothing, and find a copy that was cut off before minutes are spent on checksums.
    _check_sizes(path, sums)
    for name in sorted(sums)[share]:
        if tensors or not name.endswith(TENSORS_SUFFIX):
            _check_content(path / name, sums[name])


def _check_sizes(path: Path, sums: Mapping[str, FileSum]) -> None:
    suffixes = (TENSORS_SUFFIX, METADATA, RANDOM_SUFFIX)
    files = {file.name for file in path.iterdir() if file.name.endswith(suffixes)}
    for name in sorted({STATE, *files} - sums.keys()):
        raise DamagedCheckpointError(
            f"checkpoint file {path / MANIFEST} is corrupted: it does not list {name}"
        )
    for name, written in sums.items():
        file = path / name
        if not file.is_file():
            raise DamagedCheckpointError(f"checkpoint file {file} is missing")
        # A folder from elsewhere must not make a run read other files of this machine.
        if not os.path.realpath(file).startswith(f"{os.path.realpath(path)}/"):
            raise ValueError(
                f"checkpoint file {file} is a link that leaves its folder: a checkpoint has none"
            )
        num_bytes = file.stat().st_size
        if num_bytes != written.num_bytes:
            raise DamagedCheckpointError(
                f"checkpoint file {file} is truncated: it has {num_bytes} bytes, "
                f"{written.num_bytes} were written"
            )


def _check_content(file: Path, written: FileSum) -> None:
    try:
        present = sum_of_file(file)
    except OSError as error:
        raise ValueError(f"checkpoint file {file} cannot be read: {error.strerror}") from error
    if present != written:
        raise DamagedCheckpointError(f"checkpoint file {file} is corrupted: its checksum differs")


def sum_of_file(file: Path) -> FileSum:
    """Return size and CRC-32, which tell of damage; who changes a file can change the manifest too.

    The file is read in pieces, because it may be larger than the memory that is free.
    """
    crc32 = num_bytes = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
            num_bytes += len(chunk)
    return FileSum(num_bytes=num_bytes, crc32=crc32)


def find_newest_usable(
    folder: Path, check: Callable[[Path], T], *, skip: Skip | None = None
) -> T | None:
    """Return the result of `check` for the newest undamaged checkpoint, or None.

    Args:
        check: raises `DamagedCheckpointError` for a damaged checkpoint.
        skip: called for each damaged checkpoint; None sets them aside.
    """
    # Only damage is skipped: a checkpoint of another model is an error of the user.
    for path in reversed(list_steps(folder).values()):
        try:
            return check(path)
        except DamagedCheckpointError as error:
            (skip or put_aside)(path, error)
    return None


def keep_latest(path: Path, k: int) -> None:
    """Remove all but the latest `k` steps beside a new step; a `k` of 0 keeps all."""
    steps = list_steps(path.parent)
    if not k or path not in steps.values():
        return
    # Step 0 is the seed checkpoint, from which other layouts start, and stays.
    trained = [folder for step, folder in steps.items() if step]
    for folder in trained[:-k]:
        try:
            remove(folder)
        except OSError as error:
            # The new checkpoint is complete, so a run does not end for an old one.
            logger.warning("checkpoint %s could not be removed: %s", folder, error)


def put_aside(path: Path, error: DamagedCheckpointError) -> None:
    """Rename a damaged checkpoint, so that nothing loads it, and log a warning."""
    aside = path.with_name(f"{path.name}{DAMAGED}")
    numbers = count(2)
    while aside.exists():
        aside = path.with_name(f"{path.name}{DAMAGED}-{next(numbers)}")
    try:
        path.rename(aside)
    except OSError as problem:
        reason = problem.strerror or problem
        raise DamagedCheckpointError(f"{error}; it could not be set aside: {reason}") from problem
    logger.warning("%s; it is set aside as %s, and an earlier one is taken", error, aside.name)


def list_damaged_folders(folder: str | Path) -> list[Path]:
    return sorted(Path(folder).glob(f"*{DAMAGED}*"))


def _read_manifest(folder: Path) -> dict[str, FileSum]:
    content = _read_json(folder / MANIFEST)
    try:
        sums = {name: FileSum(**entry) for name, entry in content["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"checkpoint file {folder / MANIFEST} is corrupted: {error!r}"
        ) from error
    # A name with a folder in it would be a file outside of the checkpoint.
    for name in sums:
        if not name or Path(name).name != name:
            raise DamagedCheckpointError(
                f"checkpoint file {folder / MANIFEST} lists {name!r}: must be the name of a file "
                "beside it"
            )
    return sums


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps({"format": FORMAT, **content}, indent=2) + "\n", encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file; a format of a later version is an error, but not damage."""
    if not file.is_file():
        raise DamagedCheckpointError(
            f"checkpoint file {file} is missing: {file.parent} is not a complete checkpoint"
        )
    try:
        content: dict[str, Any] = parse_json(file.read_text(encoding="utf-8"))
        version = content.pop("format")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpointError(f"checkpoint file {file} is corrupted: {error!r}") from error
    if version not in _READABLE:
        raise ValueError(
            f"checkpoint file {file} has format {version!r}; this version reads "
            f"{' and '.join(map(str, _READABLE))}"
        )
    return content
